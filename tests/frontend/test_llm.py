"""`LLM` without an engine: its command line, its prompts. With one: tests/e2e/test_llm.py."""

import io
import sys
from array import array

import numpy as np
import pytest

from common import client_messages as wire
from common.cli import OptionParser, config_from, config_from_options
from common.errors import ConfigError, RequestError, StartupError
from frontend import llm


def test_options_become_the_command_line_of_the_engine():
    options = {"max_model_len": 64, "enforce_eager": True, "served_model_name": ("a", "b"), "dtype": "float32"}
    arguments = llm.command_line(config_from_options(model="folder", http=False, **options))
    assert arguments[0] == sys.executable
    config = config_from(OptionParser(prog="launch.py").parse(arguments[3:]))
    assert (config.model.model, config.model.max_model_len, config.model.dtype) == ("folder", 64, "float32")
    assert config.model.served_model_name == ("a", "b")
    assert config.worker.enforce_eager
    assert not config.server.http


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="max_len"):
        llm.LLM("folder", max_len=5)


@pytest.mark.parametrize("options", [{}, {"busy_poll_ms": None, "device": None}], ids=["none", "left as they are"])
def test_an_engine_that_does_not_start_says_why(options, monkeypatch):
    script = "import sys; print('noise', file=sys.stderr); sys.exit('trireme: no such model')"
    monkeypatch.setattr(llm, "command_line", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(StartupError, match=r"exit code 1\): no such model$"):
        llm.LLM("folder", **options)


def test_the_engines_log_goes_to_a_logger_with_its_levels(caplog):
    lines = [
        "a line of nobody's",
        "12:00:01.123 INFO    scheduler  ready",
        "12:00:01.124 WARNING worker-0   few blocks",
        "Traceback (most recent call last):",
        "",
        '{"time": 1.5, "level": "error", "process": "frontend", "message": "no \\u6d77"}',
        "12:00:01.125 DEBUG   frontend   caf\ufffd",
    ]
    caplog.set_level("DEBUG", "trireme")
    log = llm.EngineLog(io.BytesIO("\n".join(lines).replace("\ufffd", "\udcff").encode(errors="surrogateescape")))
    log.wait()
    assert [record.getMessage() for record in caplog.records] == [line for line in lines if line]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING", "WARNING", "ERROR", "DEBUG"]
    assert log.last_line == lines[-1]


@pytest.mark.parametrize(
    ("prompts", "plain"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt_token_ids": (1, 2)}, [[1, 2]]),
        ({"prompt_token_ids": [1, 2], "prompt": "text", "multi_modal_data": None}, [[1, 2]]),
        ([{"prompt": "text"}, array("i", [1])], ["text", [1]]),
        ([np.int64(5), np.int64(6)], [[5, 6]]),
        (np.array([5, 6]), [[5, 6]]),
        ([np.array([5, 6]), (7,)], [[5, 6], [7]]),
        ([], []),
    ],
)
def test_prompts_of_all_shapes(prompts, plain):
    sent = [wire.Generate(request_id="a", prompt=prompt).to_wire() for prompt in llm._as_many(prompts)]
    received = [wire.decode_from_client(data).prompt for data in sent]
    assert [prompt if isinstance(prompt, str) else list(prompt) for prompt in received] == plain


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        ({"prompt": "text", "multi_modal_data": {"image": "x"}}, "got multi_modal_data, prompt"),
        ({"prompt_token_ids": [1], "cache_salt": "s"}, "got cache_salt, prompt_token_ids"),
        ({"role": "user", "content": "text"}, "got content, role"),
        ({"prompt": None}, "got neither"),
        ({}, "got neither"),
        (5, "got int"),
        (None, "got NoneType"),
    ],
)
def test_what_is_more_or_less_than_a_prompt_is_refused_and_named(prompt, got):
    """An image beside a text was left out without a word."""
    with pytest.raises(RequestError, match=f"^prompt: wanted .*{got}$"):
        wire.Generate(request_id="a", prompt=prompt).to_wire()
