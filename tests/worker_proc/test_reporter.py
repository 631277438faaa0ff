"""Results leave in order, and a step that fails in the reporter's thread stops the thread that issues steps."""

import queue
import threading
from array import array
from types import SimpleNamespace

import pytest

from common.messages import StepResult, Stop, Unprepared, decode_from_worker
from worker_proc.reporter import STEP_TIMEOUT_S, InlineReporter, ThreadReporter
from worker_proc.worker import QUIET_MS, Worker

DEADLINE_S = 30


class Step:
    """A step with a result, or with an error."""

    def __init__(self, step_id: int, error: Exception | None = None) -> None:
        self._step_id, self._error = step_id, error

    def result(self, report_us: int = 0) -> StepResult:
        if self._error is not None:
            raise self._error
        return StepResult(step_id=self._step_id, token_ids=array("i"), parts_us=array("i", [1, 2, 3, report_us]))


def sent_steps(sent: list[bytes]) -> list[int]:
    return [decode_from_worker(data).step_id for data in sent]


def test_a_thread_sends_what_it_has_in_order_before_it_ends():
    sent: list[bytes] = []
    reporter = ThreadReporter(sent.append, pytest.fail)
    for step_id in range(1, 20):
        reporter.report(Step(step_id))
    reporter.close()
    assert sent_steps(sent) == list(range(1, 20))
    reporter.check()


def test_a_thread_says_when_it_has_sent_everything():
    heard: queue.Queue[str] = queue.Queue()
    reporter = ThreadReporter(lambda _: heard.put("sent"), pytest.fail, lambda: heard.put("idle"))
    first = Hanging(1)
    reporter.report(first)
    reporter.report(Step(2))
    first.may_end.set()
    reporter.close()
    assert list(heard.queue) == ["sent", "sent", "idle"]


def test_a_failed_step_wakes_the_issuing_thread_and_raises_there():
    woken: queue.Queue[tuple[str, str]] = queue.Queue()
    sent: list[bytes] = []
    reporter = ThreadReporter(sent.append, lambda text: woken.put((text, threading.current_thread().name)))
    reporter.report(Step(1))
    reporter.report(Step(2, RuntimeError("the card fell off")))
    assert woken.get(timeout=DEADLINE_S) == ("RuntimeError: the card fell off", "report")
    with pytest.raises(RuntimeError, match="the card fell off"):
        reporter.check()
    with pytest.raises(RuntimeError, match="the card fell off"):
        reporter.report(Step(3))
    reporter.close()
    assert sent_steps(sent) == [1]
    assert woken.empty()


class Hanging(Step):
    """A step that the device does not finish until it is let go."""

    def __init__(self, step_id: int) -> None:
        super().__init__(step_id)
        self.may_end = threading.Event()

    def result(self, report_us: int = 0) -> StepResult:
        assert self.may_end.wait(DEADLINE_S)
        return super().result(report_us)


def test_a_device_that_hangs_ends_the_wait_and_a_slow_one_does_not():
    """The thread that issues steps turned all the time, so that nobody noticed: requests waited for ever."""
    sent: queue.Queue[bytes] = queue.Queue()
    reporter = ThreadReporter(sent.put, pytest.fail)
    steps = [Hanging(1), Hanging(2)]
    for step in steps:
        reporter.report(step)
        assert not reporter.is_idle
        reporter.note_quiet(STEP_TIMEOUT_S * 1000 - 1)
        if step is steps[0]:
            step.may_end.set()
            sent.get(timeout=DEADLINE_S)
            while reporter._sent_count == 0:
                pass
    with pytest.raises(RuntimeError, match="the device does not respond: no step has come back for 60 s"):
        reporter.note_quiet(1)
    steps[1].may_end.set()
    reporter.close()


def test_the_worker_looks_at_the_device_while_it_waits_for_plans():
    class Broken(ThreadReporter):
        is_idle = False

        def note_quiet(self, milliseconds: int) -> None:
            raise RuntimeError(f"quiet for {milliseconds} ms")

    worker = object.__new__(Worker)
    worker._poller = SimpleNamespace(poll=lambda timeout_ms: [])
    worker._link, worker._plans = SimpleNamespace(wake_fd=-1), None
    with pytest.raises(RuntimeError, match=f"quiet for {QUIET_MS} ms"):
        worker._next_plan(None, object.__new__(Broken))


@pytest.mark.parametrize("make", [InlineReporter, lambda send: ThreadReporter(send, pytest.fail)])
def test_the_scheduler_hears_each_number_of_unprepared_sizes_once_behind_the_steps_before(make):
    """Steps ask for sizes of their own, pauses prepare some, and an error ends that: the number goes up and down."""
    sent: list[bytes] = []
    reporter, worker = make(sent.append), object.__new__(Worker)
    worker._unprepared_count = 5
    for step_id, count in enumerate((5, 6, 6, 4, 0), 1):
        reporter.report(Step(step_id))
        worker._tell_unprepared(SimpleNamespace(unprepared_count=count), reporter)
    worker._tell_unprepared(SimpleNamespace(unprepared_count=0), reporter)
    if isinstance(reporter, ThreadReporter):
        reporter.close()
    assert reporter.is_idle
    heard = [decode_from_worker(data) for data in sent]
    told = [message if isinstance(message, Unprepared) else message.step_id for message in heard]
    assert told == [1, 2, Unprepared(6), 3, 4, Unprepared(4), 5, Unprepared(0)]


def test_a_pause_prepares_and_says_so_until_nothing_is_left():
    """The loop waits without a limit only once it has said that."""
    left, waits_ms, sent = [3], [], []

    def prepare_next() -> bool:
        left[0] -= 1
        return left[0] > 0

    def poll(poller, timeout_ms):
        waits_ms.append(timeout_ms)
        return [] if timeout_ms is not None else [(-1, 1)]

    class Runner:
        unprepared_count = property(lambda _: left[0])

    runner, worker = Runner(), object.__new__(Worker)
    runner.prepare_next = prepare_next
    worker._unprepared_count, worker._plans, worker._poller = 3, None, None
    worker._busy = SimpleNamespace(poll=poll, note=lambda: None)
    worker._link, worker._traces = SimpleNamespace(wake_fd=-1, take_orders=lambda: [Stop(0)]), None
    assert worker._next_plan(runner, InlineReporter(sent.append)) is None
    assert waits_ms == [QUIET_MS] * 3 + [None]
    assert [decode_from_worker(data) for data in sent] == [Unprepared(2), Unprepared(1), Unprepared(0)]


def test_a_result_carries_what_the_report_before_it_took():
    sent: list[bytes] = []
    clock = iter([1_000, 51_000, 60_000, 61_000])
    reporter = InlineReporter(sent.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker_proc.reporter.time.perf_counter_ns", lambda: next(clock))
        reporter.report(Step(1))
        reporter.report(Step(2))
    assert [decode_from_worker(data).parts_us[3] for data in sent] == [0, 50]
