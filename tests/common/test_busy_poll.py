"""When a loop asks for messages without sleeping, and for how long."""

import errno
import math
import os
import sys
import threading

import pytest
import zmq

from common import busy_poll
from common.busy_poll import (
    AUTOMATIC_MS,
    CONTESTED_S,
    LEAST_CPUS,
    LEAST_IO_CPUS,
    PAUSE_S,
    BusyPoll,
    Errands,
    is_io_kept_awake,
    limit_s_for,
)
from common.config import BUSY_POLL_AUTOMATIC, EngineConfig, ModelOptions, ServerOptions
from common.errors import ConfigError
from common.sockets import new_context


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


@pytest.mark.parametrize("limit_s", [0.0, 0.005])
def test_without_a_message_or_without_the_option_a_poll_sleeps(limit_s):
    busy, poller = BusyPoll(limit_s, clock=Clock()), Poller(0)
    if not limit_s:
        busy.note()
    assert busy.poll(poller, 2.3) and busy.poll(poller)
    assert poller.timeouts_ms == [3, None], "whole milliseconds, never fewer than asked for"
    assert not busy.turn()


def test_after_a_message_a_poll_asks_for_so_long_and_then_sleeps():
    busy, poller = BusyPoll(0.005, clock=Clock(step_s=0.0001)), Poller(2)
    busy.note()
    assert busy.poll(poller)
    assert poller.timeouts_ms == [0, 0, 0]
    poller = Poller(1000)
    assert busy.poll(poller) == []
    assert poller.timeouts_ms[-1] is None and set(poller.timeouts_ms[:-1]) == {0}


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


def test_a_processor_that_others_want_is_left_to_them_for_a_while(monkeypatch):
    clock = Clock()
    busy = BusyPoll(0.005, clock=clock)

    def give_to_others(for_s: float) -> None:
        monkeypatch.setattr(os, "sched_yield", lambda: setattr(clock, "now_s", clock.now_s + for_s))

    give_to_others(CONTESTED_S / 2)
    assert busy.note() and busy.turn()
    give_to_others(CONTESTED_S * 1.5)
    assert not busy.turn()
    assert not busy.note() and not busy.turn()
    poller = Poller(0)
    assert busy.poll(poller) and poller.timeouts_ms == [None]
    clock.now_s += PAUSE_S
    give_to_others(0)
    assert busy.note() and busy.turn()


def test_of_several_that_poll_alone_the_others_sleep():
    lock = threading.Lock()
    first, second = (BusyPoll(0.005, alone=lock, clock=Clock(step_s=0.0001)) for _ in range(2))
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
        (BUSY_POLL_AUTOMATIC, "auto", True, LEAST_CPUS, AUTOMATIC_MS),
        (BUSY_POLL_AUTOMATIC, "cuda", True, 64, AUTOMATIC_MS),
        (BUSY_POLL_AUTOMATIC, "cpu", True, 64, 0),
        (BUSY_POLL_AUTOMATIC, "auto", False, 64, 0),
        (BUSY_POLL_AUTOMATIC, "auto", True, LEAST_CPUS - 0.5, 0),
    ],
)
def test_the_machine_decides_unless_the_option_does(monkeypatch, option_ms, device, gpu, cpus, wanted_ms):
    monkeypatch.setattr(busy_poll, "has_gpu", lambda: gpu)
    monkeypatch.setattr(busy_poll, "granted_cores", lambda: cpus)
    assert limit_s_for(option_ms, device) * 1000 == pytest.approx(wanted_ms)


@pytest.mark.parametrize("option_ms", [-2, -0.5, 1000.5, math.inf, math.nan, "5", None, True])
def test_other_milliseconds_are_refused(option_ms):
    """In a client's program they counted as -1, or for ever, or ended in a TypeError."""
    with pytest.raises(ConfigError, match=f"busy_poll_ms is {option_ms!r}; wanted 0 to 1000, or -1"):
        limit_s_for(option_ms)


@pytest.mark.parametrize(
    ("option", "option_ms", "device", "gpu", "cpus", "wanted"),
    [
        ("always", 5, "cpu", False, 1, True),
        ("never", BUSY_POLL_AUTOMATIC, "auto", True, 64, False),
        ("auto", BUSY_POLL_AUTOMATIC, "auto", True, LEAST_IO_CPUS, sys.platform == "linux"),
        ("auto", BUSY_POLL_AUTOMATIC, "auto", True, LEAST_IO_CPUS - 0.5, False),
        ("auto", BUSY_POLL_AUTOMATIC, "cpu", True, 64, False),
        ("auto", BUSY_POLL_AUTOMATIC, "auto", False, 64, False),
        ("auto", 5, "auto", True, 64, False),
        ("auto", 0, "auto", True, 64, False),
    ],
)
def test_threads_of_sockets_stay_awake_where_there_are_processors_for_them(
    monkeypatch, option, option_ms, device, gpu, cpus, wanted
):
    monkeypatch.setattr(busy_poll, "has_gpu", lambda: gpu)
    monkeypatch.setattr(busy_poll, "granted_cores", lambda: cpus)
    assert is_io_kept_awake(option, option_ms, device) == wanted


@pytest.mark.parametrize("cpus", [2, LEAST_CPUS, LEAST_IO_CPUS])
@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize("ms", [BUSY_POLL_AUTOMATIC, 0, 20])
@pytest.mark.parametrize("io", ["auto", "never"])
def test_a_client_beside_an_engine_waits_as_the_engine_does(monkeypatch, cpus, device, ms, io):
    """It does not know the engine's device, on which that depends."""
    monkeypatch.setattr(busy_poll, "has_gpu", lambda: True)
    monkeypatch.setattr(busy_poll, "granted_cores", lambda: cpus)
    config = EngineConfig(server=ServerOptions(busy_poll_ms=ms, busy_poll_io=io), model=ModelOptions(device=device))
    own_ms, own_io = busy_poll.of_client_beside(config)
    assert limit_s_for(own_ms) == pytest.approx(limit_s_for(ms, device))
    assert is_io_kept_awake(own_io, own_ms) == is_io_kept_awake(io, ms, device)


@pytest.mark.parametrize("option", [True, False, "", "on"])
def test_another_option_for_threads_of_sockets_is_refused(option):
    """It counted as `never`, also in programs that still say True."""
    with pytest.raises(ConfigError, match=f"busy_poll_io is {option!r}; wanted one of auto, always, never"):
        is_io_kept_awake(option, BUSY_POLL_AUTOMATIC)


def test_a_process_without_file_descriptors_does_not_poll(monkeypatch):
    """The look for a GPU raised OSError, where a client says in words what there is too little of."""

    def find_no_room(*arguments):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "scandir", find_no_room)
    assert limit_s_for(BUSY_POLL_AUTOMATIC) == 0


class CountedErrands:
    """Counts how often it is sent."""

    def __init__(self) -> None:
        self.count, self.is_open = 0, True

    def send(self) -> None:
        self.count += 1

    def close(self) -> None:
        self.is_open = False


def test_errands_are_sent_while_a_loop_asks_and_not_afterwards():
    clock = Clock(step_s=0.0001)
    busy, errands = BusyPoll(0.005, clock=clock), CountedErrands()
    busy.errands = errands
    assert not busy.turn() and errands.count == 0
    busy.note()
    while busy.turn():
        pass
    assert errands.count > 10
    sent = errands.count
    assert not busy.turn() and errands.count == sent
    busy.close()
    busy.close()
    assert busy.errands is None and not errands.is_open


def test_an_errand_comes_back_again_and_again_and_its_context_can_end():
    context = new_context()
    first, second = Errands(context), Errands(context)
    for _ in range(3):
        for errands in (first, second):
            assert errands._pull.poll(10_000), "the message has come back"
            errands.send()
            errands.send()  # nothing to do, or the next one already
    first.close()
    second.close()
    context.term()


def test_a_loop_that_never_asks_has_no_errands():
    with new_context() as context:
        busy = BusyPoll(0.0)
        busy.keep_awake(context)
        assert busy.errands is None
