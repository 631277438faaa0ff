"""The line that a request leaves in the log, for people and for machines."""

import json
import logging
from array import array

import pytest

from common.config import LogOptions
from common.log import JsonFormatter, TextFormatter
from common.sampling_params import SamplingParams
from tests.support.frontend_in_memory import Events, FrontendInMemory


@pytest.fixture
def logging_engine(byte_tokenizer):
    running = FrontendInMemory(byte_tokenizer, LogOptions(enable_log_requests=True))
    yield running
    running.engine.close()


def finished(running, *, formatter, caplog) -> str:
    """Run a request and give its line."""
    lines = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(formatter.format(record))

    logger, handler = logging.getLogger("frontend.request_log"), Keep()
    logger.addHandler(handler)
    with caplog.at_level(logging.INFO):
        request = running.core.submit(
            array("i", [5, 6, 7]), SamplingParams(max_tokens=2), Events(), name="mine", client_key="someone"
        )
        number = request.request_id
        running.tokens(number, [70], cached_counts=array("i", [2]), prefill_us=array("i", [0]))
        running.tokens(number, [71], preemption_counts=array("B", [1]), finish="length")
    logger.removeHandler(handler)
    assert len(lines) == 1
    return lines[0]


def test_a_line_for_people(logging_engine, caplog):
    line = finished(logging_engine, formatter=TextFormatter("frontend"), caplog=caplog)
    assert "length: 3 tokens in (2 cached), 2 out, first after " in line
    assert line.endswith("preempted 1 times, client someone  [mine]")
    for part in ("queued", "prefill", "decode", "ms a token", "done after"):
        assert part in line


def test_an_object_for_machines(logging_engine, caplog):
    entry = json.loads(finished(logging_engine, formatter=JsonFormatter("frontend"), caplog=caplog))
    counts = {"outcome": "length", "client": "someone", "prompt_tokens": 3, "cached_tokens": 2, "output_tokens": 2,
              "preemptions": 1, "request_id": "mine"}  # fmt: skip
    assert counts.items() <= entry.items()
    times = ("encode_ms", "queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "itl_ms", "total_ms")
    assert all(entry[name] >= 0 for name in times)
    assert entry["ttft_ms"] == pytest.approx(entry["encode_ms"] + entry["queue_ms"] + entry["prefill_ms"], abs=0.01)


def test_an_abort_before_the_first_token_has_no_times(logging_engine, caplog):
    with caplog.at_level(logging.INFO):
        request = logging_engine.core.submit(array("i", [5]), SamplingParams(), Events())
        logging_engine.core.abort(request.request_id)
    record = caplog.records[-1]
    assert record.getMessage().startswith("abort: 1 tokens in (0 cached), 0 out, done after ")
    assert record.fields["ttft_ms"] is None and record.fields["queue_ms"] is None
