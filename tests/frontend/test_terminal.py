"""What `status` says, and how a chat in the terminal goes on; the commands as a whole are in tests/e2e."""

import builtins
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.client_messages import StatusReply
from common.errors import EngineDeadError, RequestError
from common.run_dir import Instance
from frontend import terminal
from frontend.terminal_chat import Chat, read_lines
from frontend.terminal_status import describe, duration, line_count, show

FIGURES = {
    "running_count": 3, "waiting_count": 1, "swapped_count": 0, "total_block_count": 1000, "free_block_count": 500,
    "cached_block_count": 300, "prompt_tokens": 12345, "output_tokens": 6000, "preemptions": 2,
    "prefix_query_tokens": 10, "prefix_hit_tokens": 6, "steps": 100, "chunk_tokens": 1000, "decode_tokens": 300,
    "step_plan_us": 0, "step_wire_us": 0, "step_input_us": 0, "step_forward_us": 0, "step_sampling_us": 0,
    "step_report_us": 0,
}  # fmt: skip


def reply(live_count=4, **changes):
    limits = {"block_size": 16, "max_model_len": 2048}
    return StatusReply("1", "serving", "", ("tiny",), live_count, limits, {**FIGURES, **changes})


def test_an_idle_engine_in_four_lines():
    assert describe(None, reply(0), 0.0) == [
        "  state     serving",
        "  requests  3 running, 1 waiting",
        "  KV cache  20% held, 30% cached, of 1,000 blocks of 16 tokens",
        "  in all    12,345 tokens in (60% from the prefix cache), 6,000 out, 2 preemptions",
    ]


def test_restarts_are_told_where_there_were_any():
    assert describe(None, reply(0, restarts=2), 0.0)[-1].endswith("6,000 out, 2 preemptions, 2 restarts")
    assert describe(None, reply(0, restarts=1), 0.0)[-1].endswith("2 preemptions, 1 restart")


def test_a_busy_engine_says_how_fast_it_is():
    later = reply(output_tokens=6500, steps=200, chunk_tokens=1400, decode_tokens=700, step_forward_us=310_000,
                  step_plan_us=2000)  # fmt: skip
    lines = describe(reply(), later, 2.0)
    assert "  speed     250 tokens/s out, 200 in; 50 steps/s of 4.0 sequences" in "\n".join(lines)
    assert "  a step    plan 20 us, wire 0 us, input 0 us, forward 3.1 ms, sampling 0 us, report 0 us" in "\n".join(
        lines
    )


def test_an_engine_that_starts_or_is_dead_says_that():
    assert describe(None, StatusReply("1", "dead", "worker-0 was killed", (), 0, {}, {}), 0) == [
        "  state     dead: worker-0 was killed"
    ]
    assert duration(3723) == "1:02:03"


def test_status_of_real_sockets(shared_frontend, capsys):
    ready = {
        "model": "tiny", "http": "", "client_endpoint": shared_frontend.endpoint,
        "local_endpoint": shared_frontend.endpoint, "ready_at_s": time.time(),
    }  # fmt: skip
    instance = Instance(Path("/run"), os.getpid(), ready)
    assert show([instance, Instance(Path("/run"), 7, {})]) == 0
    text = capsys.readouterr().out
    assert "tiny, up 0:00:0" in text and "  state     serving" in text and text.endswith("pid 7: starting\n")
    assert show([instance], as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["pid"], found["live_count"]) == ("serving", os.getpid(), 0)
    assert found["limits"]["block_size"] == 16


class ScriptedClient:
    """Answers with the number of messages; refuses where the last one says so."""

    def __init__(self) -> None:
        self.welcome = SimpleNamespace(model_names=("tiny",))
        self.asked: list = []

    def chat(self, messages, params, *, stream):
        self.asked.append([dict(message) for message in messages])
        if messages[-1]["content"] == "too long":
            raise RequestError("the prompt has 9 tokens", code="context_length_exceeded")
        return self

    def __enter__(self):
        return iter([SimpleNamespace(text="answer ", token_ids=[1]), SimpleNamespace(text="to it", token_ids=[2, 3])])

    def __exit__(self, *_):
        pass


@pytest.fixture
def talk(monkeypatch):
    """Types lines into a chat; gives the client and the messages at the end."""

    def talk(*lines, system=""):
        waiting = iter(lines)

        def typed(prompt=""):
            print(prompt, end="")
            try:
                return next(waiting)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", typed)
        client = ScriptedClient()
        chat = Chat(client, {}, system)
        assert chat.run() == 0
        return client, chat.messages

    return talk


def contents(messages):
    return [f"{message['role'][0]}:{message['content']}" for message in messages]


def test_a_talk_keeps_what_was_said(talk, capsys):
    client, messages = talk("Hi", "", "Ho \\", "and more")
    assert contents(messages) == ["u:Hi", "a:answer to it", "u:Ho \nand more", "a:answer to it"]
    assert [len(asked) for asked in client.asked] == [1, 3]
    captured = capsys.readouterr()
    assert captured.out == "answer to it\nanswer to it\n", "only answers are on stdout"


def test_a_person_sees_a_prompt_and_a_file_gets_none(monkeypatch, capsys):
    monkeypatch.setattr(builtins, "input", lambda prompt="": print(prompt, end="") or "Hi")
    seen = {}
    for stdin, stdout in [(True, True), (True, False), (False, True), (False, False)]:
        monkeypatch.setattr("sys.stdin.isatty", lambda here=stdin: here, raising=False)
        monkeypatch.setattr("sys.stdout.isatty", lambda here=stdout: here, raising=False)
        assert read_lines() == "Hi"
        seen[stdin, stdout] = tuple(capsys.readouterr())
    assert seen == {
        (True, True): ("> ", ""),
        (True, False): ("", "> "),
        (False, True): ("", ""),
        (False, False): ("", ""),
    }


def test_a_line_wider_than_the_terminal_is_cleared_as_a_whole():
    assert line_count(["one\ntwo", "x" * 161], 80) == 5
    assert line_count([""], 80) == 1


def test_commands(talk, capsys):
    client, messages = talk("/again", "Hi", "/again", "/clear", "/system be brief", "Ho", "/nothing", "/exit", "Never")
    assert contents(messages) == ["s:be brief", "u:Ho", "a:answer to it"]
    assert [contents(asked)[-1] for asked in client.asked] == ["u:Hi", "u:Hi", "u:Ho"]
    notes = capsys.readouterr().err
    assert "there is no question yet" in notes and "there is no /nothing" in notes and "/system TEXT" in notes


def test_a_refused_question_is_forgotten_and_the_talk_goes_on(talk, capsys):
    client, messages = talk("Hi", "too long", "Ho", system="be brief")
    assert contents(messages) == ["s:be brief", "u:Hi", "a:answer to it", "u:Ho", "a:answer to it"]
    assert contents(client.asked[-1]) == ["s:be brief", "u:Hi", "a:answer to it", "u:Ho"]
    assert "refused: the prompt has 9 tokens" in capsys.readouterr().err


def test_a_path_is_no_command(talk):
    client, _ = talk("/etc/hosts is what?")
    assert contents(client.asked[0]) == ["u:/etc/hosts is what?"]


def test_an_endpoint_that_was_given_is_told_before_it_is_waited_for(monkeypatch, capfd):
    """Where nobody answers, the chat was silent for half a minute."""
    told = []

    def nobody(endpoint: str, **_: object) -> None:
        told.append(capfd.readouterr().err)
        raise EngineDeadError("nobody")

    monkeypatch.setattr(terminal, "Client", nobody)
    with pytest.raises(EngineDeadError):
        terminal.run("chat", ["--client-endpoint", "tcp://127.0.0.1:1"])
    assert told == ["connecting to tcp://127.0.0.1:1; Ctrl-C gives up\n"]
