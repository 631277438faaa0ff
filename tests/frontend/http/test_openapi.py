"""The description of the API is complete, true, and can be read by programs and by people."""

import re

import pytest
from starlette.routing import Route

from frontend.http.endpoints import ENDPOINTS
from frontend.http.openapi import document

BODIES = [endpoint for endpoint in ENDPOINTS if endpoint.body is not None]


@pytest.fixture
def described(api):
    return api.get("/openapi.json").json()


def test_every_route_is_described(api, described):
    routes = [route for route in api.app.routes if isinstance(route, Route)]
    assert len(routes) == len(api.app.routes) == len(described["paths"])
    for route in routes:
        operations = described["paths"][route.path.replace(":path", "")]
        assert {verb.upper() for verb in operations} == route.methods - {"HEAD"}, route.path
        for operation in operations.values():
            assert operation["summary"], f"{route.path} has no description"
    ids = [operation["operationId"] for path in described["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("endpoint", "stream"),
    [(endpoint, stream) for endpoint in BODIES for stream in (False, True) if endpoint.streams or not stream],
    ids=lambda value: getattr(value, "path", "stream" if value else "whole"),
)
def test_every_example_is_accepted(endpoint, stream, make_api, tmp_path):
    api = make_api().ready()
    if "profile" in endpoint.path:
        object.__setattr__(api.engine.config.profiling, "profile_dir", str(tmp_path))
        api.engine.order_profile = lambda order: None
    response = api.post(endpoint.path, {**endpoint.example, **({"stream": True} if stream else {})})
    assert response.status_code == 200, response.text
    media = described_media(endpoint.path)
    assert response.headers["content-type"].partition(";")[0] == media[1 if stream else 0]


def described_media(path: str) -> list[str]:
    operation = document(ENDPOINTS)["paths"][path]["post"]
    return list(operation["responses"]["200"]["content"])


def test_every_field_of_every_body_is_described_with_its_type(described):
    schemas = described["components"]["schemas"]
    for endpoint in BODIES:
        schema = schemas[endpoint.body.__name__]
        assert set(schema["properties"]) == set(endpoint.body.__struct_fields__)
        assert set(endpoint.example) <= set(schema["properties"]), f"{endpoint.path}: the example has unknown fields"
        assert set(schema.get("required", ())) <= set(endpoint.example)
    assert schemas["ChatRequest"]["properties"]["min_p"] == {
        "anyOf": [{"type": "number"}, {"type": "null"}],
        "description": "keep tokens at least this fraction as likely as the likeliest.",
    }
    assert set(schemas["ErrorDetail"]["properties"]) == {"message", "type", "param", "code"}
    silent = [
        f"{name}.{field}"
        for name, schema in schemas.items()
        for field, about in schema["properties"].items()
        if not about.get("description")
    ]
    assert silent == [], "the docstrings do not say what these are"
    assert schemas["ChatRequest"]["properties"]["logprobs"]["description"].startswith("show log probabilities")


def test_all_references_lead_somewhere(described):
    wanted = set(re.findall(r"#/components/schemas/(\w+)", str(described)))
    assert wanted <= set(described["components"]["schemas"])


def test_keys_and_the_path_before_all_paths_are_described(make_api):
    assert "security" not in document(ENDPOINTS)
    api = make_api(api_key=("secret",), root_path="/llm").ready()
    assert api.get("/openapi.json").status_code == 401
    described = api.get("/openapi.json", headers={"authorization": "Bearer secret"}).json()
    assert described["servers"] == [{"url": "/llm"}]
    assert described["security"] == [{"key": []}]


def test_the_page_shows_every_endpoint_and_needs_nothing_else(api, described):
    page = api.get("/docs").text
    for path in described["paths"]:
        assert f"</b> {path}</summary>" in page
    assert "<td>messages<td>array of object, required" in page
    assert not re.search(r"<script|https?:|src=|@import", page)
