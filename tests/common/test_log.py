"""Lines on stderr: with `--log-format json` every one is an object, whoever wrote it."""

import json
import logging
import random
import subprocess
import sys

import pytest

from common import log
from common.processes import Child, DeathPipe

TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n    1/0\nZeroDivisionError: by zero\n'
)
STACKS = "Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  File 1\nCurrent thread 0x2 (most recent call first):\n  File 2\n"  # noqa: E501
OWN = '{"time": 1.5, "level": "warning", "process": "worker-0", "logger": "a", "message": "few blocks"}\n'


@pytest.fixture
def as_json(monkeypatch):
    monkeypatch.setattr(log._objects, "process", "supervisor")


def entries(data: bytes) -> list[dict]:
    return [json.loads(line) for line in data.decode().splitlines()]


def through(text: str, cuts=()) -> list[dict]:
    data, lines, out = text.encode(errors="surrogateescape"), log.ForeignLines("worker-0"), b""
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        out += lines.feed(data[start:end])
    return entries(out + lines.end())


@pytest.mark.parametrize(
    ("text", "messages", "levels"),
    [
        ("a print\n", ["a print"], ["info"]),
        ("no end of line", ["no end of line"], ["info"]),
        (" 10%|#   \r 90%|#########\n", ["10%|#", "90%|#########"], ["info", "info"]),
        ("trireme: no such model\n", ["no such model"], ["error"]),
        (OWN, ["few blocks"], ["warning"]),
        ('"a string"\n[1]\n{"not": \n', ['"a string"', "[1]", '{"not":'], ["info"] * 3),
        (TRACEBACK, ["ZeroDivisionError: by zero"], ["error"]),
        (TRACEBACK.rpartition("Zero")[0], ["Traceback (most recent call last):"], ["error"]),
        (TRACEBACK + OWN, ["ZeroDivisionError: by zero", "few blocks"], ["error", "warning"]),
        (
            STACKS,
            ["Fatal Python error: Aborted", "Thread 0x1 (most recent call first):", "Current thread 0x2 (most recent call first):"],  # noqa: E501
            ["error"] * 3,
        ),
        ("\n \n\udcff\n", ["\ufffd"], ["info"]),
        (TRACEBACK.partition(" ")[0] + " (most recent call last):\n  x\n" + OWN, ["Traceback (most recent call last):", "few blocks"], ["error", "warning"]),  # noqa: E501
    ],
)  # fmt: skip
def test_what_a_child_writes_becomes_objects_wherever_it_is_cut(text, messages, levels):
    size = len(text.encode(errors="surrogateescape"))
    for cuts in ([], range(1, size), sorted(random.Random(size).sample(range(size), size // 3))):
        found = through(text, cuts)
        assert [entry["message"] for entry in found] == messages
        assert [entry["level"] for entry in found] == levels
        assert {entry["process"] for entry in found} == {"worker-0"}


def test_a_stack_is_one_object_with_all_its_lines():
    [entry] = through(TRACEBACK)
    assert entry["traceback"] == TRACEBACK.rstrip()


def test_a_line_without_end_is_cut_and_not_kept():
    found = through("x" * 200_000, range(50_000, 200_000, 50_000))
    assert [len(entry["message"]) for entry in found] == [100_000, 100_000]


def test_a_line_that_nests_too_deeply_is_one_like_any_other():
    """The thread that passes lines on ended with an error, and the child waited for ever at a full pipe."""
    line = "[" * 50_000
    assert [entry["message"] for entry in through(line)] == [line]
    assert log.said(line) == line


@pytest.mark.parametrize(
    "line",
    [
        b'{"a": NaN}',
        b'{"a": [-Infinity]}',
        '{"a": 1}'.encode("utf-16-le"),
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\xed\xa0\x80"}',
    ],
    ids=["NaN", "infinity", "UTF-16", "byte order mark", "surrogate"],
)
def test_a_line_that_only_python_takes_for_an_object_becomes_one(line):
    """It was passed on as it was, and strict readers failed at it."""
    text = line.decode(errors="replace")
    assert [entry["message"] for entry in through(line.decode(errors="surrogateescape") + "\n")] == [text]
    assert log.said(text) == text


def test_a_stack_without_end_is_cut_and_not_kept():
    lines = log.ForeignLines("worker-0")
    lines.feed(TRACEBACK.rpartition("Zero")[0].encode())
    for _ in range(3):
        lines.feed(b"  again\n" * log.STACK_LIMIT_LINES)
        assert len(lines._stack) <= log.STACK_LIMIT_LINES


def test_every_line_of_a_child_is_an_object_on_our_stderr(as_json, capfd):
    death_pipe = DeathPipe()
    script = "import logging, sys\nfrom common import log\nlog.set_up('worker-0', form='json')\n"
    script += "logging.warning('of the log')\nprint('a print', file=sys.stderr)\nraise KeyError('x')"
    child = Child("worker-0", ["-c", script], death_pipe)
    assert child.wait(60)
    assert child.describe_end() == "worker-0 ended with exit code 1: KeyError: 'x'"
    child.close()
    death_pipe.close()
    found = entries(capfd.readouterr().err.encode())
    assert [(entry["level"], entry["message"]) for entry in found] == [
        ("warning", "of the log"), ("info", "a print"), ("error", "KeyError: 'x'")
    ]  # fmt: skip


def test_what_is_said_beside_the_log_has_its_form(monkeypatch, capsys):
    log.say("no such model", "error", log.PROGRAM)
    monkeypatch.setattr(log._objects, "process", "supervisor")
    log.say("no such model", "error", log.PROGRAM)
    plain, entry = capsys.readouterr().err.splitlines()
    assert plain == "trireme: no such model"
    assert json.loads(entry).items() >= {"level": "error", "process": "supervisor", "message": "no such model"}.items()
    assert log.said(plain) == log.said(entry) == "no such model"
    record = logging.makeLogRecord({"msg": "from %s", "args": ("here",)})
    assert log.said(log.JsonFormatter("frontend").format(record)) == "from here"
    assert [log.said(line) for line in ("", "[1]", '{"message": 5}', "{")] == ["", "[1]", '{"message": 5}', "{"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "/nowhere", "--log-format", "json"],
        ["--log_format=json", "--prot", "1"],
        ["serve", "--log-format=json", "--port", "99999"],
        ["sevre", "--log-format", "json"],
    ],
    ids=repr,
)
def test_what_ends_a_run_before_it_begins_is_an_object(arguments, tmp_path):
    root, home = log.__file__.rpartition("/common/")[0], {"HOME": str(tmp_path)}
    command = [sys.executable, "launch.py", *arguments]
    run = subprocess.run(command, cwd=root, env=home, capture_output=True, check=False, timeout=60)
    assert run.returncode == 2 and run.stdout == b""
    found = entries(run.stderr)
    assert found[-1]["level"] == "error" and found[-1]["process"] == "supervisor"


@pytest.mark.parametrize(
    ("text", "arguments", "is_json"),
    [
        ("log-format: json\nprot: 1", [], True),
        ("port: 1\nport: 2\nlog_format: json", [], True),
        ('{"log-format": "json", "port": 99999}', [], True),
        ("log-format: json\nport: 99999", ["--log-format=text"], False),
        ("log-format: json\nport: 99999", ["--log_format", "text"], False),
        ("log-format: [json", [], False),
        ("prot: 1", [], False),
        ("log-format: json", ["--config"], False),
    ],
)
def test_a_refused_file_is_told_of_in_the_form_that_it_asks_for(
    monkeypatch, capsys, tmp_path, text, arguments, is_json
):
    """It was told in plain text, between objects."""
    from launcher import command

    monkeypatch.setattr(log._objects, "process", "")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    file = tmp_path / "a=b.yaml"
    file.write_text(text)
    assert command.run(["--config", str(file), *arguments]) == 2
    line = capsys.readouterr().err
    assert line.startswith("{" if is_json else "trireme: ")
    assert not is_json or entries(line.encode())[-1]["level"] == "error"


def test_a_fault_of_the_supervisors_own_is_an_object(monkeypatch, capsys):
    from launcher import command

    monkeypatch.setattr(log._objects, "process", "")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(command.serve, "serve", lambda _: 1 // 0)
    assert command.run(["--log-format", "json"]) == 1
    [entry] = entries(capsys.readouterr().err.encode())
    assert entry["level"] == "critical" and entry["traceback"].endswith(
        "ZeroDivisionError: integer division or modulo by zero"
    )
