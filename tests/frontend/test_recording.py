"""A recorded frontend's core, replayed in memory: what it is told and tells when a process is lost, or was."""

import asyncio
import contextlib
import inspect
import json
import random
from array import array
from dataclasses import replace

import pytest

from benchmarks.fake_scheduler import LIMITS
from common import messages as m
from common.client_messages import SampleSoFar
from common.config import EngineConfig, ProfilingOptions, ServerOptions
from common.errors import ConfigError, RequestError, WireError
from common.recording import Link, recorder_for, sending
from common.sampling_params import SamplingParams
from common.wire import pack
from frontend import recording
from frontend.core import Core
from frontend.engine import Engine
from frontend.outbox import GROUP_SIZE
from frontend.replay import main
from frontend.tokenizer import Tokenizer
from tests.support import tiny
from tests.support.frontend_in_memory import Events

SOON_S = 1e-9


@pytest.fixture
def config(tmp_path):
    tiny.save_tokenizer(tmp_path)
    kept = ProfilingOptions(record=str(tmp_path / "recording"))
    return EngineConfig(model_dir=str(tmp_path), server=ServerOptions(restart=True), profiling=kept)


class Recorded:
    """A frontend that records itself, the test being everything around it."""

    def __init__(self, config: EngineConfig) -> None:
        self._recorder = recorder_for(config, "frontend")
        send = sending(self._recorder, Link.REQUESTS, lambda data, more=False: None)
        self.engine = Engine(config, Tokenizer.load(config.model_dir), send, self._recorder)
        self.core = self.engine.core
        self.hear(LIMITS)

    def hear(self, message: m.ForFrontend) -> None:
        self._recorder.received(Link.OUTPUTS, message.to_wire())
        self.core.handle(message)

    def submit(self, **options) -> Events:
        events = Events()
        params = SamplingParams(max_tokens=9, temperature=0.5)
        events.request = self.core.submit(array("i", [5, 6]), params, events, **options)
        return events

    def tokens(self, events: Events, *token_ids: int, finish: str | None = None) -> None:
        ids, last = array("i", token_ids), (m.SampleFinish(0, finish),) if finish else ()
        numbers, counts = array("i", [events.request.request_id]), array("B", [len(ids)])
        self.hear(m.TokensOut(request_ids=numbers, token_ids=ids, token_counts=counts, finishes=last))

    def close(self) -> None:
        self.engine.close()
        self._recorder.close()


def replayed(capsys, folder: object) -> dict:
    code = main([str(folder)])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == bool(summary["different"])
    return summary


def test_a_recording_goes_on_when_scheduler_and_worker_are_lost(config, capsys):
    running = Recorded(config)
    whole, poison, late = running.submit(), running.submit(), running.submit(timeout_s=SOON_S)
    running.tokens(whole, 5)
    running.core.suspend("worker-0 was killed", 1)
    assert running.core.end_overdue() and late.end.code == "deadline_exceeded"
    held = running.submit(timeout_s=60)
    running.hear(LIMITS)
    assert not running.core.end_overdue()
    running.tokens(whole, 6, 7)
    running.tokens(held, 5)
    running.core.suspend("scheduler was killed", 2)
    assert poison.end.code == "engine_restarted"
    running.hear(LIMITS)
    running.tokens(held, 8, finish="length")
    running.tokens(whole, 8, finish="length")
    running.close()
    summary = replayed(capsys, config.profiling.record)
    assert summary["different"] == 0 and summary["equal"] > 12


def test_a_batch_that_went_ahead_in_parts_is_replayed(config, capsys):
    """How many parts it had depended on when its requests came, which no recording tells."""
    running = Recorded(config)
    for _ in range(2 * GROUP_SIZE + 1):
        running.core.gather()
        running.submit()
    running.core.send_gathered()
    running.close()
    summary = replayed(capsys, config.profiling.record)
    assert (summary["different"], summary["equal"]) == (0, 2 * GROUP_SIZE + 1)


def test_what_is_started_again_has_a_recording_of_its_own(config, capsys):
    for session in (0, 2):
        running = Recorded(replace(config, session=session))
        known = None if not session else [SampleSoFar(0, array("i", [5]))]
        running.tokens(running.submit(resumed=known), 6, finish="length")
        running.submit(resumed=[SampleSoFar(0, array("i", [5]), "length")])
        running.close()
    with pytest.raises(ConfigError, match="is there already"):
        recorder_for(config, "frontend")
    for folder in ("", "/2"):
        assert replayed(capsys, config.profiling.record + folder)["different"] == 0


def test_tokens_that_go_straight_to_a_connection_are_recorded_too(config, capsys):
    taken = []

    class Shortcut:
        def take(self, text: str) -> bool:
            taken.append(text)
            return True

    async def stream(running):
        events = await running.engine.generate([5, 6], SamplingParams(max_tokens=9))
        events.shortcuts = [Shortcut()]
        reading = asyncio.ensure_future(events.final())
        await asyncio.sleep(0)
        for token_id in (5, 6, 7, 8):
            running.hear(m.TokensOut(request_ids=array("i", [0]), token_ids=array("i", [token_id])))
        running.tokens(events, 9, finish="length")
        return (await reading).samples[0].text

    with contextlib.closing(Recorded(config)) as running:
        text = asyncio.run(stream(running))
    assert len(taken) == 4 and text.startswith("".join(taken))
    summary = replayed(capsys, config.profiling.record)
    assert (summary["different"], summary["equal"]) == (0, 7), "a request, five deltas, an end"


@pytest.mark.parametrize("fields", [(recording.DRAIN, 1), (recording.ABORT,), (recording.ABORT, 1, 2), (99,)], ids=str)
def test_what_is_no_record_of_a_call_is_not_repeated(config, fields):
    with contextlib.closing(Recorded(config)) as running, pytest.raises(WireError):
        recording.repeat_call(running.core, pack(fields))


UNRECORDED = {
    "arrival", "check_serving",  # tell something and change nothing
    "abort_named",  # its aborts are recorded
    "handle",  # its messages are
    "gather", "promise", "send_gathered",  # the same messages in the same order, but for those that are hints
}  # fmt: skip


def test_every_call_that_changes_the_core_is_recorded():
    """Requests that ended with their client's key went on in the replay, which told of a difference."""
    calls = {name for name in vars(Core) if not name.startswith("_") and inspect.isfunction(getattr(Core, name))}
    assert calls - UNRECORDED == {name for name in vars(recording.RecordedCore) if not name.startswith("_")}


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_is_replayed_without_a_difference(config, capsys, seed):
    rng, running, events = random.Random(seed), Recorded(config), []

    def some() -> int:
        return rng.choice(events).request.request_id if events else 99

    calls = {
        "submit": lambda: events.append(running.submit(timeout_s=rng.choice([None, SOON_S]))),
        "tokens": lambda: (
            events and running.tokens(rng.choice(events), *rng.choices(range(5, 60), k=rng.randint(1, 3)))
        ),
        "end": lambda: events and running.tokens(rng.choice(events), 9, finish=rng.choice(["stop", "length", "error"])),
        "refused": lambda: running.hear(m.RequestFailed(some(), "queue_full", "full", status=429)),
        "fail": lambda: running.core.fail(some(), RequestError("revoked", code="key_revoked", status=401)),
        "abort": lambda: running.core.abort(some()),
        "abort all": lambda: rng.random() < 0.2 and running.core.abort_named(None),
        "flush": running.core.flush_cache,
        "suspend": lambda: rng.random() < 0.4 and running.core.suspend("killed", rng.randint(1, 5)),
        "ready": lambda: running.hear(LIMITS),
        "overdue": running.core.end_overdue,
        "fail all": lambda: rng.random() < 0.2 and running.core.fail_all("bye", code="shutting_down", dead=False),
    }
    for name in rng.choices(list(calls), weights=[4, 4, *[1] * 10], k=120):
        with contextlib.suppress(RequestError):  # too many wait
            calls[name]()
    running.core.drain()
    running.core.fail_all("worker-0 was killed")
    assert all(event.end is not None for event in events)
    running.close()
    summary = replayed(capsys, config.profiling.record)
    assert summary["different"] == 0 and summary["equal"] > 30, f"seed {seed}"
