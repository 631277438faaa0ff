"""The client socket under messages gone wrong: each costs itself, and whoever else is connected notices nothing."""

import logging

from common.sampling_params import SamplingParams
from frontend import Client
from tests.support.attack import attack


def test_messages_gone_wrong_cost_themselves(run_frontend, caplog):
    frontend = run_frontend(server={"restart": True})
    with Client(frontend.endpoint, timeout_s=60) as client:
        frontend.scheduler.gate.clear()
        stream = client.submit("the open sea", SamplingParams(max_tokens=200))
        frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 1)
        frontend.scheduler.gate.set()
        with caplog.at_level(logging.ERROR):
            seen = attack(frontend.endpoint, range(500))
        assert {"bad_message", "invalid_parameter", 82} <= {*seen}, seen
        assert caplog.records == [], "an exception was not foreseen"
        assert stream.result().completion_tokens == 200
        assert client.generate("abc", SamplingParams(max_tokens=3)).text == "abc"
    frontend.scheduler.wait_until(lambda: frontend.scheduler.live_count == 0)
