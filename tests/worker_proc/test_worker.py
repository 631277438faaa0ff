"""The real worker process over real sockets, with a scheduler and a supervisor played by the test."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions
from common.messages import (
    Failed,
    Ready,
    Stop,
    WorkerReady,
    decode_for_supervisor,
    decode_from_worker,
)
from common.sockets import bind_pull, bind_router, connect_push, new_context

ROOT = Path(__file__).parents[2]
DEADLINE_MS = 60_000


class WorkerProcess:
    """A worker as the supervisor starts it, and the sockets of its peers."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self.context = new_context()
        self.control = bind_router(self.context, config.endpoint("supervisor"))
        self.results = bind_pull(self.context, config.endpoint("results"))
        self.plans = connect_push(self.context, config.endpoint("plans-0"))
        path = folder / "config.json"
        path.write_text(config.to_json())
        self.log_path = folder / "log"
        command = [sys.executable, "-m", "worker_proc", "--config", str(path), "--rank", "0"]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=log, start_new_session=True)

    def result(self):
        assert self.results.poll(DEADLINE_MS), f"no result; the worker's log:\n{self.log_path.read_text()}"
        return decode_from_worker(self.results.recv())

    def supervisor_message(self, kind: type):
        """The next message of that kind, heartbeats and others skipped."""
        while self.control.poll(DEADLINE_MS):
            message = decode_for_supervisor(self.control.recv_multipart()[1])
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind.__name__}; the worker's log:\n{self.log_path.read_text()}")

    def close(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for socket in (self.control, self.results, self.plans):
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def start_worker(tmp_path):
    started = []

    def start(**model) -> WorkerProcess:
        run_dir = tmp_path / f"run{len(started)}"
        run_dir.mkdir()
        config = EngineConfig(
            model=ModelOptions(dtype="float32", **model),
            cache=CacheOptions(block_size=4, num_kv_blocks=64),
            scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=64),
            run_dir=str(run_dir),
            model_dir=str(tmp_path),
        )
        started.append(WorkerProcess(config, run_dir))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def test_worker_serves_plans_over_sockets_and_stops(tiny_model, start_worker, plan_driver, reference_tokens):
    reference, _ = tiny_model("Llama")
    worker = start_worker(device="cpu")
    ready = worker.result()
    assert isinstance(ready, WorkerReady)
    assert (ready.block_size, ready.block_count, ready.vocab_size, ready.device_name) == (4, 64, 131, "cpu")
    assert ready.max_model_len == 256
    assert "cpu" in worker.supervisor_message(Ready).detail

    def execute(plan):
        worker.plans.send(plan.to_wire())
        return worker.result()

    driver = plan_driver(execute, slot_count=8, block_count=ready.block_count, block_size=4)
    requests = [driver.add([5, 6, 7]), driver.add(list(range(3, 20)))]
    driver.run(requests, 12, chunk=5)
    for request in requests:
        expected = reference_tokens(reference, request.tokens[: request.prompt_count], 12)
        assert request.output == expected

    worker.control.send_multipart([b"worker-0", Stop(0).to_wire()])
    assert worker.process.wait(timeout=30) == 0


def test_bytes_that_are_no_plan_end_the_worker_with_a_message(tiny_model, start_worker):
    """Only the scheduler sends here: the requests of a plan that was dropped in silence would hang for ever."""
    tiny_model("Llama")
    worker = start_worker(device="cpu")
    assert isinstance(worker.result(), WorkerReady)
    worker.plans.send(b"\x91\xccnot a plan")
    assert "a message of the scheduler cannot be read" in worker.supervisor_message(Failed).message
    assert worker.process.wait(timeout=30) == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_model_len": 300, "device": "cpu"}, "--max-model-len is 300, but the KV cache holds 256 tokens"),
        ({"max_model_len": 257, "device": "cuda"}, "cuda"),
    ],
)
def test_worker_that_cannot_start_says_why_and_exits_2(options, text, tiny_model, start_worker):
    tiny_model("Llama", max_position_embeddings=1000)
    worker = start_worker(**options)
    assert text in worker.supervisor_message(Failed).message
    assert worker.process.wait(timeout=30) == 2
    assert "Traceback" not in worker.log_path.read_text()


def test_an_impossible_plan_ends_the_worker_with_a_message(tiny_model, start_worker, plan_driver):
    tiny_model("Llama")
    worker = start_worker(device="cpu")
    assert isinstance(worker.result(), WorkerReady)
    driver = plan_driver(lambda plan: None, slot_count=8, block_count=64, block_size=4)
    request = driver.add([5, 6, 7])
    driver.plan([(request, 3)])
    request.tokens.append(9)
    worker.plans.send(driver.plan([(request, 1)]).to_wire())
    assert "slot" in worker.supervisor_message(Failed).message
    assert worker.process.wait(timeout=30) == 1
