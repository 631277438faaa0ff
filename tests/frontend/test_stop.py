"""A frontend that is told to stop: requests finish within the grace, and the rest ends with an error."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from common import messages as m
from common.errors import EngineDeadError, RequestError
from common.sampling_params import SamplingParams
from frontend import Client
from tests.support.patient_http import post


def test_stop_lets_requests_finish_and_refuses_new_ones(frontend):
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        running = client.submit("abc", SamplingParams(max_tokens=5))
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 1)
        frontend.link.order(m.Stop(30_000))
        while client.status().state != "draining":
            pass
        with pytest.raises(RequestError, match="shutting down"):
            client.generate("a")
        frontend.scheduler.gate.set()
        assert running.result().completion_tokens == 5
    assert frontend.stop() == 0


def test_stop_without_grace_ends_requests_with_an_error(frontend):
    frontend.scheduler.gate.clear()
    with Client(frontend.endpoint) as client:
        running = client.submit("abc", SamplingParams(max_tokens=5))
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 1)
        assert frontend.stop() == 0
        with pytest.raises(RequestError, match="shut down"):
            running.result()
        client.timeout_s = 0.1  # nobody comes any more
        with pytest.raises(EngineDeadError):
            client.submit("a").result()


@pytest.mark.parametrize(("stream", "has_begun"), [(False, True), (True, False), (True, True)])
def test_a_stop_that_is_hurried_ends_requests_with_an_error(run_frontend, stream, has_begun):
    """A second Ctrl-C: connections were cut without a word."""
    frontend = run_frontend(server={"http": True, "port": 0}, is_held=True)
    url = frontend.link.detail.partition("HTTP ")[2].partition(";")[0]
    body = {"prompt": "abc", "max_tokens": 5, "stream": stream}
    with Client(frontend.endpoint) as client, ThreadPoolExecutor(1) as pool:
        running = client.submit("abc", SamplingParams(max_tokens=5))
        answer = pool.submit(post, f"{url}/v1/completions", json=body)
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 2)
        if has_begun:
            frontend.scheduler.advance(2, 1)
            assert next(running).token_ids
        frontend.link.order(m.Stop(600_000))
        while client.status().state != "draining":
            pass
        assert frontend.stop(grace_ms=0) == 0
        with pytest.raises(RequestError, match="shut down"):
            running.result()
        assert "the engine has shut down" in answer.result().text
        assert answer.result().status_code == (200 if stream and has_begun else 503)
