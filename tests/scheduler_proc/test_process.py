"""The scheduler as a real process, between a simulated worker and a pretended frontend on real sockets."""

import os
import subprocess
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import zmq

from common.child import DEATH_PIPE_VARIABLE
from common.config import EngineConfig, ProfilingOptions, SchedulerOptions, ServerOptions
from common.messages import (
    PROTOCOL_VERSION,
    AbortRequests,
    EngineReady,
    EngineStats,
    Failed,
    ForFrontend,
    Heartbeat,
    NewSession,
    PeerFailed,
    QueueNews,
    Ready,
    RequestFailed,
    Stop,
    TokensOut,
    WorkerReady,
    decode_for_frontend,
    decode_for_supervisor,
    decode_for_worker,
)
from common.sockets import bind_pull, bind_router, connect_push, new_context
from scheduler_proc import replay
from scheduler_proc.simulation import SimulatedWorker, expected_outputs, simple_request

ROOT = Path(__file__).parents[2]
TIMEOUT_MS = 20_000


class Harness:
    """A scheduler process with everything around it played by the test."""

    def __init__(self, folder: Path) -> None:
        self.context = new_context()
        self.config = EngineConfig(
            run_dir=str(folder),
            scheduler=SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=32, max_num_queued_reqs=16),
            server=ServerOptions(shutdown_timeout=1),
            profiling=ProfilingOptions(record=str(folder / "recording")),
        )
        self.supervisor = bind_router(self.context, self.config.endpoint("supervisor"))
        self.outputs = bind_pull(self.context, self.config.endpoint("outputs"))
        self.plans = bind_pull(self.context, self.config.endpoint("plans-0"))
        self.requests = connect_push(self.context, self.config.endpoint("requests"))
        self.results = connect_push(self.context, self.config.endpoint("results"))
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.stats: list[EngineStats] = []
        self.heard: list[ForFrontend] = []
        (folder / "config.json").write_text(self.config.to_json())
        self.pipe = os.pipe()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "scheduler_proc", "--config", folder / "config.json"],
            cwd=ROOT,
            env={**os.environ, DEATH_PIPE_VARIABLE: str(self.pipe[0])},
            pass_fds=[self.pipe[0]],
        )

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        for fd in self.pipe:
            os.close(fd)
        self.context.destroy(linger=0)

    def order(self, message: Stop | PeerFailed | NewSession) -> None:
        self.supervisor.send_multipart([b"scheduler", message.to_wire()])

    def worker_ready(self, block_count: int = 64) -> EngineReady:
        self.worker = SimulatedWorker(block_size=4, block_count=block_count)
        ready = WorkerReady(
            protocol_version=PROTOCOL_VERSION, rank=0, max_model_len=200, block_size=4, block_count=block_count,
            host_block_count=0, block_bytes=1, vocab_size=997, device_name="cpu", unprepared_count=2,
        )  # fmt: skip
        self.results.send(ready.to_wire())
        return self.announcement()

    def announcement(self) -> EngineReady:
        """What a frontend hears first: figures that are right already, and what it may begin with."""
        stats, message = self.receive_out(), self.receive_out()
        assert isinstance(stats, EngineStats) and isinstance(message, EngineReady)
        assert stats.total_block_count == message.block_count
        assert (stats.running_count, stats.waiting_count, stats.unprepared_count) == (0, 0, 2)
        return message

    def receive_out(self) -> ForFrontend:
        assert self.outputs.poll(TIMEOUT_MS), "the scheduler sends nothing"
        return decode_for_frontend(self.outputs.recv())

    def supervisor_hears(self, kind: type) -> Ready | Failed | Heartbeat:
        while True:
            assert self.supervisor.poll(TIMEOUT_MS), f"the supervisor hears no {kind.__name__}"
            message = decode_for_supervisor(self.supervisor.recv_multipart()[1])
            if isinstance(message, kind):
                return message

    def serve(self, sample_count: int) -> dict[int, RequestFailed]:
        """Play worker and frontend until so many samples have ended; the requests that failed."""
        poller = zmq.Poller()
        poller.register(self.outputs, zmq.POLLIN)
        poller.register(self.plans, zmq.POLLIN)
        failures: dict[int, RequestFailed] = {}
        ended = 0
        while ended < sample_count:
            ready = dict(poller.poll(TIMEOUT_MS))
            assert ready, f"only {ended} of {sample_count} samples have ended"
            if self.plans in ready:
                self.results.send(self.worker.run(decode_for_worker(self.plans.recv())).to_wire())
            if self.outputs in ready:
                message = self.receive_out()
                self.heard.append(message)
                if isinstance(message, RequestFailed):
                    failures[message.request_id] = message
                    ended += 1
                elif isinstance(message, TokensOut):
                    self.hear_tokens(message)
                    ended += len(message.finishes)
                elif isinstance(message, EngineStats):
                    self.stats.append(message)
        return failures

    def serve_until_idle(self) -> None:
        """Play worker and frontend until the scheduler says that nobody runs or waits and no block is held."""
        poller = zmq.Poller()
        poller.register(self.outputs, zmq.POLLIN)
        poller.register(self.plans, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(TIMEOUT_MS))
            assert ready, "the scheduler says nothing, and was not idle when it last did"
            if self.plans in ready:
                self.results.send(self.worker.run(decode_for_worker(self.plans.recv())).to_wire())
            if self.outputs in ready:
                message = self.receive_out()
                if isinstance(message, TokensOut):
                    self.hear_tokens(message)
                elif isinstance(message, EngineStats):
                    self.stats.append(message)
                    held = message.total_block_count - message.free_block_count - message.cached_block_count
                    if not (message.running_count or message.waiting_count or held) and message.prompt_tokens:
                        return

    def hear_tokens(self, out: TokensOut) -> None:
        samples = out.sample_indices or array("B", bytes(len(out.request_ids)))
        assert not out.token_counts
        for request_id, sample, token in zip(out.request_ids, samples, out.token_ids, strict=True):
            self.tokens.setdefault((request_id, sample), []).append(token)


@pytest.fixture
def harness(tmp_path):
    harness = Harness(tmp_path)
    yield harness
    harness.close()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_serves_requests_and_survives_bad_bytes(harness):
    ready = harness.worker_ready()
    assert (ready.max_num_seqs, ready.block_count, ready.max_model_len) == (8, 64, 200)
    assert isinstance(harness.supervisor_hears(Ready), Ready)
    messages = [simple_request(i, range(i, i + 20), max_tokens=10, n=1 + i % 2) for i in range(10)]
    for message in messages:
        harness.requests.send(b"\xc1 not a message")
        harness.requests.send(message.to_wire())
    harness.requests.send(AbortRequests(array("i", [77])).to_wire())
    assert not harness.serve(15)
    assert harness.tokens == expected_outputs(messages)
    assert resident_bytes(harness.child.pid) < 80 << 20


def test_a_request_that_cannot_be_read_fails_and_the_others_are_served(harness):
    harness.worker_ready()
    good = simple_request(8, range(20), max_tokens=4)
    harness.requests.send(replace(good, request_id=7, client_key="k" * 257).to_wire())
    harness.requests.send(good.to_wire())
    failures = harness.serve(2)
    assert list(failures) == [7]
    assert (failures[7].error_code, failures[7].status) == ("internal_error", 500)
    assert "client_key" in failures[7].message
    assert harness.tokens == expected_outputs([good])


def test_a_result_that_cannot_be_read_ends_the_scheduler_with_a_message(harness):
    """Only the workers send here: the requests of a result that was dropped in silence would hang for ever."""
    harness.worker_ready()
    harness.results.send(b"")
    assert "a message of the worker cannot be read" in harness.supervisor_hears(Failed).message
    assert harness.child.wait(20) == 1


def test_a_small_cache_serves_everybody_who_can_be_served(harness):
    """Faults C1, C3 and C8 through the real process: refusal, preemption with tokens in flight, prefix hits."""
    harness.worker_ready(block_count=10)
    messages = [simple_request(i, range(i % 3, 12), max_tokens=16) for i in range(12)]
    harness.requests.send(simple_request(99, range(100), max_tokens=1).to_wire())
    for message in messages:
        harness.requests.send(message.to_wire())
    failures = harness.serve(len(messages) + 1)
    assert list(failures) == [99] and failures[99].error_code == "context_length_exceeded"
    assert harness.tokens == expected_outputs(messages)
    harness.serve_until_idle()
    assert harness.stats[-1].preemptions > 0


def test_the_frontend_hears_who_waits_and_who_does_no_more(harness):
    """What waits is in no step that may be what ends the worker; of what nothing is said runs."""
    harness.worker_ready()
    for i in range(12):  # of which eight may run side by side
        harness.requests.send(simple_request(i, range(3), max_tokens=4).to_wire())
    assert not harness.serve(12)
    told, waiting = set(), set()
    for message in harness.heard:
        if isinstance(message, QueueNews):
            assert not told & set(message.waiting_ids) and set(message.started_ids) <= waiting
            told |= set(message.waiting_ids)
            waiting = (waiting | set(message.waiting_ids)) - set(message.started_ids)
        elif isinstance(message, TokensOut):
            assert not set(message.request_ids) & waiting, "a token of one that waits"
    assert told and not waiting


def test_random_aborts_leave_nothing_behind(harness):
    """Fault C5 through the real process: queued, mid-prompt, decoding, with several samples."""
    harness.worker_ready()
    random = Random(5)
    kept = []
    for i in range(150):
        message = simple_request(i, range(i % 7, 30 + i % 5), max_tokens=12, n=1 + i % 2)
        harness.requests.send(message.to_wire())
        if random.random() < 0.6:
            harness.requests.send(AbortRequests(array("i", [random.randrange(i + 1)])).to_wire())
        elif len(kept) < 10:
            kept.append(message)
    harness.requests.send(AbortRequests(array("i", set(range(150)) - {m.request_id for m in kept})).to_wire())
    harness.serve_until_idle()
    expected = expected_outputs(kept)
    ended = {key: tokens for key, tokens in harness.tokens.items() if key in expected and len(tokens) == 12}
    assert all(tokens == expected[key] for key, tokens in ended.items())


def test_stop_lets_requests_finish(harness):
    harness.worker_ready()
    message = simple_request(1, range(20), max_tokens=30)
    harness.requests.send(message.to_wire())
    assert harness.plans.poll(TIMEOUT_MS)
    harness.order(Stop(20_000))
    assert not harness.serve(1)
    assert harness.tokens == expected_outputs([message])
    assert harness.child.wait(20) == 0


def test_stop_ends_the_rest_after_the_grace_period(harness):
    harness.worker_ready()
    harness.requests.send(simple_request(1, range(20), max_tokens=30).to_wire())
    assert harness.plans.poll(TIMEOUT_MS)
    harness.order(Stop(1))
    message = harness.receive_out()
    while isinstance(message, EngineStats):
        message = harness.receive_out()
    assert isinstance(message, RequestFailed)
    assert (message.request_id, message.error_code, message.status) == (1, "shutting_down", 503)
    assert harness.child.wait(20) == 0


def test_a_frontend_that_was_started_again_finds_an_engine_without_requests(harness):
    """Its numbers begin anew: nothing that is said of the old one's request 0 may reach it."""
    ready = harness.worker_ready()
    harness.requests.send(simple_request(0, range(20), max_tokens=100).to_wire())
    for _ in range(3):
        assert harness.plans.poll(TIMEOUT_MS)
        harness.results.send(harness.worker.run(decode_for_worker(harness.plans.recv())).to_wire())
    old = harness.outputs, harness.requests
    harness.outputs = bind_pull(harness.context, harness.config.endpoint("outputs", 1))
    harness.requests = connect_push(harness.context, harness.config.endpoint("requests", 1))
    harness.order(NewSession("frontend", "frontend was killed", 1))
    assert harness.announcement() == ready
    message = simple_request(0, range(5, 30), max_tokens=10)
    harness.requests.send(message.to_wire())
    harness.tokens.clear()
    assert not harness.serve(1)
    assert harness.tokens == expected_outputs([message])
    harness.serve_until_idle()
    for socket in old:
        socket.close(linger=0)
    harness.order(Stop(0))
    assert harness.child.wait(20) == 0
    assert replay.main([harness.config.profiling.record]) == 0, "the recording goes on in the new session"


def test_a_dead_worker_ends_every_request(harness):
    harness.worker_ready()
    harness.requests.send(simple_request(5, range(20), max_tokens=30).to_wire())
    assert harness.plans.poll(TIMEOUT_MS)
    harness.order(PeerFailed("worker-0", "worker-0 was killed by signal 9"))
    message = harness.receive_out()
    while isinstance(message, EngineStats):
        message = harness.receive_out()
    assert isinstance(message, RequestFailed)
    assert (message.error_code, message.message) == ("engine_dead", "worker-0 was killed by signal 9")
    assert harness.child.wait(20) == 0


def test_stop_before_the_worker_is_ready(harness):
    assert isinstance(harness.supervisor_hears(Heartbeat), Heartbeat)
    harness.order(Stop(1000))
    assert harness.child.wait(20) == 0
