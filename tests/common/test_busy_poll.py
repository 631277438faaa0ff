"""When a loop asks for messages without sleeping, and for how long; and that its I/O threads come along."""

import os
import sys
import threading
from array import array
from pathlib import Path

import pytest
import zmq

from common import busy_poll
from common.busy_poll import AUTOMATIC, AUTOMATIC_MS, LEAST_CPUS, STREAK_LIMIT, BusyPoll, IoThreads, limit_s_for
from common.sockets import bind_pull, io_thread_name, new_context


class Clock:
    """Time that passes when somebody looks at it."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self._step_s = 100.0, step_s

    def __call__(self) -> float:
        self.now_s += self._step_s
        return self.now_s


class Poller:
    """Finds something after so many looks; notes how long it was asked to wait each time."""

    def __init__(self, looks: float) -> None:
        self.looks = looks
        self.timeouts_ms: list[int | None] = []

    def poll(self, timeout_ms: int | None) -> list[tuple[str, int]]:
        self.timeouts_ms.append(timeout_ms)
        return [("socket", zmq.POLLIN)] if len(self.timeouts_ms) > self.looks else []


class Threads(IoThreads):
    """Notes what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def follow(self) -> None:
        self.done += [] if self.done[-1:] == ["follow"] else ["follow"]

    def release(self) -> None:
        self.done += [] if self.done[-1:] == ["release"] else ["release"]


@pytest.mark.parametrize("limit_s", [0.0, 0.005])
def test_without_a_message_or_without_the_option_a_poll_sleeps(limit_s):
    busy, poller = BusyPoll(limit_s, Threads(), clock=Clock()), Poller(0)
    if not limit_s:
        busy.note()
    assert busy.poll(poller, 2.3) and busy.poll(poller)
    assert poller.timeouts_ms == [3, None], "whole milliseconds, never fewer than asked for"
    assert not busy.turn()


def test_after_a_message_a_poll_asks_for_so_long_and_then_sleeps():
    threads = Threads()
    busy, poller = BusyPoll(0.005, threads, clock=Clock(step_s=0.0005)), Poller(2)
    busy.note()
    assert busy.poll(poller)
    assert poller.timeouts_ms == [0, 0, 0]
    poller = Poller(1000)
    assert busy.poll(poller) == []
    assert poller.timeouts_ms[-1] is None and set(poller.timeouts_ms[:-1]) == {0}
    assert threads.done == ["follow", "release"]
    assert busy.poll(Poller(0)) and threads.done == ["follow", "release"]


def test_a_timeout_ends_a_busy_poll_and_is_kept_behind_one():
    clock = Clock(step_s=0.0001)
    busy, poller = BusyPoll(0.005, clock=clock), Poller(10_000)
    busy.note()
    start_s = clock.now_s
    assert busy.poll(poller, 0.5) == []
    assert 0.0005 <= clock.now_s - start_s < 0.001, "to the microsecond: nothing slept"
    assert set(poller.timeouts_ms) == {0}
    busy.note()
    assert busy.poll(poller, 25) == []
    assert poller.timeouts_ms[-1] == 20


def test_every_message_starts_the_time_anew():
    clock = Clock()
    busy = BusyPoll(0.005, clock=clock)
    for _ in range(3):
        busy.note()
        clock.now_s += 0.004
        assert busy.turn()
    clock.now_s += 0.001
    assert not busy.turn()


def test_a_loop_without_a_turn_in_vain_keeps_its_processor_for_itself():
    threads = Threads()
    busy = BusyPoll(0.005, threads, clock=Clock())
    busy.note()
    assert busy.turn()
    for _ in range(STREAK_LIMIT):
        busy.note()
    assert threads.done == ["follow", "release"]
    assert busy.turn()
    assert threads.done == ["follow", "release", "follow"]


def test_of_several_that_poll_alone_the_others_sleep():
    lock = threading.Lock()
    first, second = (BusyPoll(0.005, alone=lock, clock=Clock(step_s=0.001)) for _ in range(2))
    first.note()
    second.note()

    class Nested(Poller):
        def poll(self, timeout_ms: int | None) -> list[tuple[str, int]]:
            inner = Poller(0)
            assert second.poll(inner)
            assert inner.timeouts_ms == [None]
            return super().poll(timeout_ms)

    assert first.poll(Nested(1))
    assert not lock.locked()
    inner = Poller(0)
    assert second.poll(inner)
    assert inner.timeouts_ms == [0]


@pytest.mark.parametrize(
    ("option_ms", "device", "gpu", "cpus", "wanted_ms"),
    [
        (0, "auto", True, 64, 0),
        (20, "cpu", False, 1, 20),
        (AUTOMATIC, "auto", True, LEAST_CPUS, AUTOMATIC_MS),
        (AUTOMATIC, "cuda", True, 64, AUTOMATIC_MS),
        (AUTOMATIC, "cpu", True, 64, 0),
        (AUTOMATIC, "auto", False, 64, 0),
        (AUTOMATIC, "auto", True, LEAST_CPUS - 0.5, 0),
    ],
)
def test_the_machine_decides_unless_the_option_does(monkeypatch, option_ms, device, gpu, cpus, wanted_ms):
    monkeypatch.setattr(busy_poll, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(busy_poll, "usable_cpus", lambda: cpus)
    assert limit_s_for(option_ms, device) * 1000 == pytest.approx(wanted_ms)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "6400000 100000\n"}, 16),
        ({"cpu.max": "nonsense"}, 16),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
    ids=repr,
)
def test_a_control_group_limits_the_processors(tmp_path: Path, monkeypatch, files, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert busy_poll.usable_cpus(tmp_path) == wanted


def io_thread_id(context: zmq.Context) -> int:
    """The thread takes its name a moment after it was started."""
    while not (found := list(busy_poll._threads_named({io_thread_name(context)}))):
        pass
    return found[0]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told their processor on Linux alone")
def test_the_io_threads_of_a_context_follow_the_loop_and_no_others_do(tmp_path):
    mine, other = new_context(), new_context()
    sockets = [bind_pull(mine, f"ipc://{tmp_path}/a"), bind_pull(other, f"ipc://{tmp_path}/b")]
    mine_id, other_id = (io_thread_id(context) for context in (mine, other))
    everywhere = os.sched_getaffinity(0)
    threads = IoThreads(mine)
    threads.follow()
    threads.follow()
    assert len(os.sched_getaffinity(mine_id)) == 1
    assert os.sched_getaffinity(other_id) == everywhere
    threads.release()
    assert os.sched_getaffinity(mine_id) == everywhere
    for socket in sockets:
        socket.close(linger=0)
    for context in (mine, other):
        context.term()
    threads.follow()  # of a thread that has ended: nothing happens
    threads.release()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told their processor on Linux alone")
def test_threads_that_are_not_found_are_not_looked_for_for_ever(monkeypatch):
    looks = []
    monkeypatch.setattr(busy_poll, "_threads_named", lambda names: looks.append(names) or ())
    with zmq.Context() as context:
        threads = IoThreads(context)
        for _ in range(3 * busy_poll.LOOKS_LIMIT):
            threads.follow()
        threads.release()
    assert len(looks) == busy_poll.LOOKS_LIMIT


@pytest.mark.skipif(sys.platform != "linux", reason="threads are told their processor on Linux alone")
def test_a_thread_that_cannot_be_told_its_processor_is_left_alone(monkeypatch):
    context = new_context()
    socket = context.socket(zmq.PULL)
    io_thread_id(context)
    calls = array("i")

    def refuse(thread_id: int, _: object) -> None:
        calls.append(thread_id)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    threads = IoThreads(context)
    for _ in range(3):
        threads.follow()
        threads.release()
    assert len(calls) == 1
    socket.close()
    context.term()
