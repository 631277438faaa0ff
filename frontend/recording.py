"""Records everything that the frontend's core is told and tells: requests as they enter, events as they leave.

    calls     [SUBMIT, prompt ids, params, options] [ABORT, id] [DRAIN] [FAIL_ALL, message, code, dead] [FLUSH]
              [SUSPEND, why, session] [OVERDUE, wall clock] [FAIL, id, message, code, status]
    events    [DELTA, request, delta] [FINAL, request, samples, usage] [FAILED, request, code, message] [REFUSED, ...]

The scheduler's messages are recorded where they enter and leave the process (`main`). The HTTP API and the client
socket are not recorded: all they do is turn bytes into calls, and events into bytes. `replay` makes the same calls on
the same class, with a comparison in place of the recorder.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from common.client_messages import Delta, SampleSoFar
from common.errors import RequestError, WireError
from common.recording import Link, Recorder
from common.sampling_params import SamplingParams
from common.wire import FieldReader, array_bytes, pack, unpack
from frontend.core import Core
from frontend.events import Final, Sink, Timings
from frontend.pieces import Piece
from frontend.request import Request

SUBMIT, ABORT, DRAIN, FAIL_ALL, FLUSH, SUSPEND, OVERDUE, FAIL = range(8)
DELTA, FINAL, FAILED, REFUSED = range(4)


class Log(Protocol):
    """Takes the core's calls and events, as lists whose first field is the kind."""

    def call(self, *fields: Any) -> None:
        """The core is called."""

    def event(self, *fields: Any) -> None:
        """The core has something for a client."""


class RecorderLog:
    """Records them."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def call(self, *fields: Any) -> None:
        """The core is called."""
        self._recorder.received(Link.CALLS, pack(fields))

    def event(self, *fields: Any) -> None:
        """The core has something for a client."""
        self._recorder.sent(Link.EVENTS, pack(fields))


class RecordedSink:
    """Records a request's events on their way to its sink.

    Args:
        log: takes what is to be recorded.
        sink: takes the events.
    """

    __slots__ = ("_log", "_sink", "request_id")

    def __init__(self, log: Log, sink: Sink) -> None:
        self.request_id = -1
        self._log = log
        self._sink = sink

    def on_token(self, sample_index: int, piece: Piece) -> None:
        """One more token of a sample."""
        self._record(DELTA, sample_index, piece.text, piece.token_id)
        self._sink.on_token(sample_index, piece)

    def on_delta(self, delta: Delta) -> None:
        """New output of a sample."""
        self._record(DELTA, *delta.to_list())
        self._sink.on_delta(delta)

    def on_final(self, final: Final) -> None:
        """The request ended."""
        usage = final.usage
        samples = [
            [s.text, array_bytes(s.token_ids), s.finish_reason, s.stop_reason, _lists(s.logprobs)]
            for s in final.samples
        ]
        prompt_logprobs = _lists(final.prompt_logprobs)
        usage_list = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
        embedding = None if final.embedding is None else array_bytes(final.embedding)
        self._record(FINAL, samples, usage_list, prompt_logprobs, embedding)
        self._sink.on_final(final)

    def on_failed(self, error: RequestError) -> None:
        """The request failed."""
        self._record(FAILED, error.code, str(error))
        self._sink.on_failed(error)

    def _record(self, kind: int, *fields: Any) -> None:
        self._log.event(kind, self.request_id, *fields)


def _lists(entries: Any) -> Any:
    return None if entries is None else [None if entry is None else entry.to_list() for entry in entries]


class RecordedCore(Core):
    """A core whose calls and events are recorded.

    Args:
        log: takes what is to be recorded.
        arguments: Core's.
    """

    def __init__(self, log: Log, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._log = log

    def submit(
        self,
        prompt_token_ids: "array[int]",
        params: SamplingParams,
        sink: Sink,
        *,
        timings: Timings | None = None,
        resumed: Sequence[SampleSoFar] | None = None,
        **options: Any,
    ) -> Request:
        """As Core's; raises RequestError."""
        timings = timings or self.arrival()
        arrival = [timings.arrived_at_s, timings.arrived_s]
        known = None if resumed is None else [sample.to_list() for sample in resumed]
        self._log.call(SUBMIT, array_bytes(prompt_token_ids), params.to_wire(), {**options, "resumed": known}, arrival)
        recorded = RecordedSink(self._log, sink)
        try:
            request = super().submit(prompt_token_ids, params, recorded, timings=timings, resumed=resumed, **options)
        except RequestError as error:
            self._log.event(REFUSED, -1, error.code, str(error))
            raise
        recorded.request_id = request.request_id
        return request

    def abort(self, request_id: int) -> None:
        """As Core's."""
        self._log.call(ABORT, request_id)
        super().abort(request_id)

    def fail(self, request_id: int, error: RequestError) -> None:
        """As Core's."""
        self._log.call(FAIL, request_id, str(error), error.code, error.status)
        super().fail(request_id, error)

    def drain(self) -> None:
        """As Core's."""
        self._log.call(DRAIN)
        super().drain()

    def fail_all(self, message: str, *, code: str = "engine_dead", dead: bool = True) -> None:
        """As Core's."""
        self._log.call(FAIL_ALL, message, code, dead)
        super().fail_all(message, code=code, dead=dead)

    def flush_cache(self) -> None:
        """As Core's."""
        self._log.call(FLUSH)
        super().flush_cache()

    def suspend(self, why: str, session: int) -> None:
        """As Core's."""
        self._log.call(SUSPEND, why, session)
        super().suspend(why, session)

    def end_overdue(self, now_s: float | None = None) -> bool:
        """As Core's."""
        now_s = self._wall_clock() if now_s is None else now_s
        self._log.call(OVERDUE, now_s)
        return super().end_overdue(now_s)


class DroppedEvents:
    """A sink that drops the events of requests that nobody reads."""

    def on_token(self, sample_index: int, piece: Piece) -> None:
        """One more token."""

    def on_delta(self, delta: Delta) -> None:
        """New output."""

    def on_final(self, final: Final) -> None:
        """The end."""

    def on_failed(self, error: RequestError) -> None:
        """The end, with an error."""


def repeat_call(core: Core, data: bytes) -> None:
    """Make a recorded call again; a refused request raises nothing here.

    Raises:
        WireError: not a record of a call.
    """
    kind, fields = unpack(data)
    calls: dict[int, Callable[[Core, FieldReader], object]] = {
        SUBMIT: _submit_again,
        ABORT: lambda core, read: core.abort(read.integer("request_id")),
        DRAIN: lambda core, _: core.drain(),
        FAIL_ALL: lambda core, read: core.fail_all(
            read.text("message"), code=read.text("code"), dead=read.flag("dead")
        ),
        FLUSH: lambda core, _: core.flush_cache(),
        SUSPEND: lambda core, read: core.suspend(read.text("why"), read.integer("session")),
        OVERDUE: lambda core, read: core.end_overdue(read.number("now_s")),
        FAIL: _fail_again,
    }
    if kind not in calls:
        raise WireError(f"call {kind} is not known")
    with FieldReader("call", fields) as read:
        calls[kind](core, read)


def _fail_again(core: Core, read: FieldReader) -> None:
    request_id, message = read.integer("request_id"), read.text("message")
    core.fail(request_id, RequestError(message, code=read.text("code"), status=read.integer("status")))


def _submit_again(core: Core, read: FieldReader) -> None:
    token_ids = read.numbers("prompt_token_ids", "i")
    params = SamplingParams.from_wire(read.mapping("params"))
    options = read.mapping("options")
    if (known := options.get("resumed")) is not None:
        options["resumed"] = [SampleSoFar.from_list(sample) for sample in known]
    arrived_at_s, arrived_s = read.nested("arrival", lambda pair: pair)
    try:
        core.submit(token_ids, params, DroppedEvents(), timings=Timings(arrived_at_s, arrived_s), **options)
    except RequestError:
        return  # as it was when it was recorded
