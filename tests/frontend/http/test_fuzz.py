"""Requests made up from the API's own description: whatever comes, the answer is one, soon, and in the API's form.

schemathesis makes the requests, good and bad ones, from /openapi.json; a failure prints the request.
"""

import asyncio

import hypothesis
import pytest

from frontend.http.endpoints import ENDPOINTS
from frontend.http.openapi import document

schemathesis = pytest.importorskip("schemathesis")

ANSWER_S = 20
SETTINGS = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck), "derandomize": True}
SCHEMA = schemathesis.openapi.from_dict(document(ENDPOINTS))


@SCHEMA.parametrize()
@hypothesis.settings(max_examples=10, **SETTINGS)
def test_any_request_is_answered(case, api):
    assert_answered(case, api)


@pytest.mark.slow
@SCHEMA.parametrize()
@hypothesis.settings(max_examples=400, **SETTINGS)
def test_many_requests_are_answered(case, api):
    assert_answered(case, api)


def assert_answered(case, api) -> None:
    """Send a request, check the answer, and that a good request succeeds after it."""
    request = case.as_transport_kwargs(base_url="http://test")
    del request["cookies"]
    if "data" in request:
        request["content"] = request.pop("data")
    response = api.loop.run_until_complete(asyncio.wait_for(api.client.request(**request), ANSWER_S))
    assert response.status_code < 500, f"{request}: {response.status_code}: {response.text}"
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, request
        assert error["message"] and error["type"], request
    elif response.headers["content-type"] == "application/json":
        response.json()
    assert api.engine.core.live_count == 0, f"{request} is still running"
    assert api.get("/version").status_code == 200
