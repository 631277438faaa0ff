"""The engine's processes live and die together (FAULTS D1, D2, D3, D11), with real processes and real signals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest

from common.errors import TriremeError
from frontend import Client, SamplingParams
from tests.support.faulty_engine import ILLEGAL_ACCESS, OUT_OF_MEMORY
from tests.support.server import ROOT, Server, children_of, wait_for_exit

pytestmark = pytest.mark.timeout(180)
ENDLESS = SamplingParams(max_tokens=60_000, temperature=0.0, ignore_eos=True)
"""Nobody waits for its end, which is minutes away: what a test does to it meets it alive."""


def start_an_endless_answer(client):
    stream = client.generate("The sea", ENDLESS, stream=True)
    next(stream)
    return stream


def test_interrupt_stops_everything_with_code_zero(tiny_model_dir):
    with Server(tiny_model_dir) as server:
        pids = server.children()
        assert {"frontend", "scheduler", "worker-0"} <= set(pids)
        assert server.stop() == 0
        server.assert_nothing_is_left(pids)


@pytest.mark.parametrize(
    ("name", "number", "reason"),
    [
        *((name, signal.SIGKILL, f"{name} was killed by signal 9") for name in ("worker-0", "scheduler", "frontend")),
        *((name, signal.SIGSTOP, name) for name in ("worker-0", "scheduler")),
    ],
)
def test_a_killed_or_frozen_process_ends_requests_with_an_error_and_the_run_with_a_code(
    long_model_dir, name, number, reason
):
    with Server(long_model_dir) as server, Client(server.ready["client_endpoint"], timeout_s=30) as client:
        pids = server.children()
        stream = start_an_endless_answer(client)
        os.kill(pids[name], number)
        with pytest.raises(TriremeError):
            list(stream)
        assert server.process.wait(30) not in (0, None)
        server.assert_nothing_is_left(pids)
        assert reason in server.stderr()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_process_that_is_lost_while_requests_finish_ends_them(long_model_dir, number):
    """They waited until --shutdown-timeout had passed, and the run ended with code 0."""
    options = ["--shutdown-timeout", "600"]
    with Server(long_model_dir, *options) as server, Client(server.ready["client_endpoint"], timeout_s=30) as client:
        pids = server.children()
        stream = start_an_endless_answer(client)
        server.process.send_signal(signal.SIGTERM)
        while client.status().state != "draining":
            pass
        os.kill(pids["worker-0"], number)
        with pytest.raises(TriremeError, match="worker-0"):
            list(stream)
        codes = {0, 1} if number == signal.SIGTERM else {1}  # one that was told to stop may take its time on the way
        assert server.process.wait(30) in codes, server.stderr()
        server.assert_nothing_is_left(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_health_says_so_before_the_run_ends(tiny_model_dir, number):
    with Server(tiny_model_dir, faulty=True) as server, httpx.Client(base_url=server.ready["http"], timeout=60) as http:
        assert http.get("/health").status_code == 200
        os.kill(server.children()["scheduler"], number)
        while (response := http.get("/health")).status_code == 200:
            pass
        assert response.status_code == 503
        assert response.json()["status"] == "dead"
        assert "scheduler" in response.json()["detail"]
        assert server.process.wait(30) == 1


def test_killing_the_supervisor_takes_all_processes_along_while_serving(tiny_model_dir):
    with Server(tiny_model_dir) as server:
        pids = server.children()
        server.process.kill()
        for name, pid in pids.items():
            wait_for_exit(pid, name)
        assert len(pids) == 3


def test_killing_the_supervisor_takes_all_processes_along_while_loading(tiny_model_dir):
    server = Server(tiny_model_dir)
    try:
        pids = {}
        while len(pids) < 3:
            assert server.process.poll() is None, server.stderr()
            pids = server.children()
        server.process.kill()
        for name, pid in pids.items():
            wait_for_exit(pid, name)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("name", "number", "cause"),
    [
        ("worker-0", signal.SIGUSR1, f"AcceleratorError: {ILLEGAL_ACCESS}"),
        ("worker-0", signal.SIGUSR2, f"OutOfMemoryError: {OUT_OF_MEMORY}"),
        ("scheduler", signal.SIGUSR1, "MemoryError"),
        ("frontend", signal.SIGUSR1, "MemoryError"),
    ],
)
def test_a_broken_device_or_an_empty_memory_ends_requests_and_the_run(long_model_dir, name, number, cause):
    """In the middle of a step; a process that stands still in its own shutdown costs nobody any time."""
    with (
        Server(long_model_dir, faulty=True) as server,
        Client(server.ready["client_endpoint"], timeout_s=30) as client,
        httpx.Client(base_url=server.ready["http"], timeout=60) as http,
    ):
        pids = server.children()
        stream = start_an_endless_answer(client)
        os.kill(pids[name], number)
        while (health := http.get("/health")).status_code == 200:
            pass
        assert health.status_code == 503
        assert health.json()["status"] == "dead"
        assert cause in health.json()["detail"]
        with pytest.raises(TriremeError, match=cause):
            list(stream)
        assert server.process.wait(30) == 1
        server.assert_nothing_is_left(pids)
    assert server.stderr().splitlines()[-1] == f"trireme: {name} failed: {cause}"
    assert "Traceback" in server.stderr()


def refused_start(*options):
    """Run launch.py to its end; (exit code, stdout, the last line on stderr)."""
    run = subprocess.run(
        [sys.executable, ROOT / "launch.py", *map(str, options)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return run.returncode, run.stdout, run.stderr.strip().splitlines()[-1]


def broken_copy(source, target, file, content):
    shutil.copytree(source, target)
    (target / file).write_text(content)
    return target


def test_a_missing_model_is_refused_in_one_line():
    code, stdout, line = refused_start("--model", "/nowhere/at/all", "--port", "0")
    assert code != 0
    assert "/nowhere/at/all" in line
    assert stdout == ""


def test_an_unknown_architecture_is_refused_by_name(tiny_model_dir, tmp_path):
    config = json.loads((tiny_model_dir / "config.json").read_text())
    config |= {"architectures": ["NovelForCausalLM"], "model_type": "novel"}
    folder = broken_copy(tiny_model_dir, tmp_path / "m", "config.json", json.dumps(config))
    code, _, line = refused_start("--model", folder, "--port", "0")
    assert code != 0
    assert "NovelForCausalLM" in line
    assert "LlamaForCausalLM" in line


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_broken_file_ends_the_start_with_a_line_that_names_it(tiny_model_dir, tmp_path, file):
    folder = broken_copy(tiny_model_dir, tmp_path / "m", file, "{ broken")
    code, _, line = refused_start("--model", folder, "--port", "0")
    assert code != 0
    assert file in line


def test_a_port_in_use_is_refused_with_its_number(tiny_model_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, line = refused_start("--model", tiny_model_dir, "--port", port)
    assert code != 0
    assert str(port) in line


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--block-size", "24"], "24"),
        (["--max-num-seqs", "8", "--max-num-batched-tokens", "4"], "max-num-batched-tokens is 4"),
        (["--no-such-option"], "no-such-option"),
        (["--max-model-len", "1e9"], "max-model-len"),
        (["--port", "http"], "port"),
    ],
)
def test_contradictory_options_are_refused_in_one_line(options, match):
    code, _, line = refused_start(*options)
    assert code == 2
    assert match in line


@pytest.mark.parametrize("name", ["text-0", "frontend", "supervisor"])
def test_text_processes_end_with_the_others_and_alone_cost_nothing(long_model_dir, name):
    text = "The sea " * 5000
    with Server(long_model_dir) as server, Client(server.ready["client_endpoint"], timeout_s=30) as client:
        before = client.tokenize(text)
        pids = server.children() | children_of(server.children()["frontend"])
        assert "text-0" in pids
        stream = start_an_endless_answer(client)
        os.kill(server.process.pid if name == "supervisor" else pids[name], signal.SIGKILL)
        if name == "text-0":
            assert client.tokenize(text) == before
            stream.abort()
            assert stream.result().samples[0].finish_reason == "abort", "it had not ended"
            assert client.generate("The sea", replace(ENDLESS, max_tokens=400)).completion_tokens == 400
            assert server.stop() == 0
        for other, pid in pids.items():
            wait_for_exit(pid, other)
