"""What is printed while nobody reads it, as behind `| head`: a verb ends without a traceback, an engine serves on."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

import launch
from common.config import EngineConfig
from common.run_dir import RunDir
from launcher import serve


@pytest.fixture
def unread() -> Iterator[int]:
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("arguments", [["--version"], ["check", "--port", "99999"], ["keys", "keys", "a"]])
def test_a_verb_ends_quietly(arguments, unread: int, tmp_path):
    command_line = [sys.executable, launch.__file__, *arguments]
    run = subprocess.run(command_line, stdout=unread, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (launch.UNREAD, "")


@pytest.mark.parametrize("how", ["directly", "in the thread of --once"])
def test_an_output_that_breaks_off_later_ends_as_quietly(how: str, monkeypatch, capfd):
    answered, discarded = threading.Event(), []

    def broken(*_: object) -> int:
        raise BrokenPipeError

    def once(_: object) -> int:
        return serve._run_once(Mock(run_until=lambda _: answered.wait(20)), Mock(poke=answered.set), "Hi")

    monkeypatch.setattr("frontend.terminal_chat.answer_once", broken)
    monkeypatch.setattr("launcher.command.run", broken if how == "directly" else once)
    monkeypatch.setattr("common.processes.discard_stdout", lambda: discarded.append(True))
    assert launch.main([]) == launch.UNREAD
    assert (discarded, capfd.readouterr().err) == ([True], "")


def test_an_engine_whose_ready_line_nobody_reads_serves_on(unread: int, tmp_path, monkeypatch):
    supervisor = Mock(config=EngineConfig(), http="http://127.0.0.1:1")
    with RunDir(tmp_path) as run_dir, open(unread, "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        serve._announce(supervisor, run_dir, serve.parse([]))
        assert (run_dir.path / "ready.json").exists()
        print("what comes later", flush=True)
