"""The life cycle of all requests, as a plain object: submissions, tokens and failures in, messages and events out.

Knows nothing of sockets, asyncio, HTTP or clients; the clock, the random numbers and the way to the scheduler are
passed in. `engine.Engine` owns the one instance of a frontend process; tests drive it directly.

    submit -> AddRequest -> TokensOut* -> final            every sample ended, or the request was aborted
                                       -> failed           RequestFailed, a broken sample, or a dead engine

A request's sink gets exactly one of `on_final` and `on_failed`, as its last call. A request is live from `submit` until
then, and its number is not reused before. What the scheduler says about requests that are not live is ignored, since an
abort and the last tokens may cross on the way.

When scheduler and worker are lost and started again (`suspend`), nothing is sent until the next EngineReady. Then every
live request is sent once more with the tokens that have come, so that it goes on from there; requests that were
submitted in the meantime are sent for the first time. So a sink sees a pause and nothing else. When the frontend itself
was lost, its clients ask again for what they had (`submit` with `resumed`): it is sent with what has come of it, too.
"""

import logging
import random
import time
from array import array
from collections.abc import Callable, Sequence

from common.client_messages import SampleSoFar
from common.errors import RequestError
from common.messages import AddRequest, EngineReady, EngineStats, ForFrontend, QueueNews, RequestFailed, TokensOut
from common.sampling_params import SamplingParams
from common.wire import INT32_MAX
from frontend.events import Sink, Timings
from frontend.figures import Figures
from frontend.outbox import Outbox
from frontend.request import Request, error_of
from frontend.request_checks import check_prompt, completed, known_bad_token_ids, known_end_token_ids, not_serving
from frontend.token_intake import TokenIntake
from frontend.tokenizer import Tokenizer

FRUITLESS_LIMIT = 2
"""A request that was lost so often with scheduler or worker, without a token in between, ends: it may be the cause."""

logger = logging.getLogger(__name__)

Observer = Callable[[Request, str], None]
"""Called once for each request that ends, with its outcome: `stop`, `length`, `abort` or an error code."""


class Core:
    """All live requests of the frontend.

    Args:
        tokenizer: the model's.
        send: takes a message for the scheduler, and True if the next one follows at once; must not block.
        seed: for the random seeds of requests that have none.
        stream_interval: tokens per delta; a sample's first and last token are not held back.
        session: how often processes of the engine had been restarted before.
        held_limit: how many requests may wait while scheduler and worker are being restarted.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.

    Attributes:
        state: `starting`, `serving`, `restarting`, `draining` or `dead`.
        limits: the engine's, once it is ready.
        stats: the last figures from the scheduler.
        figures: the frontend's own statistics.
        observers: called when a request ends, by `later`: at once, or when the process has sent the answer.
        after_tokens: called when sinks have got all tokens of a message; some gather what they write.
        error: why the engine is dead, or restarting.
        session: how often processes of the engine have been restarted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        send: Callable[..., object],
        *,
        seed: int = 0,
        stream_interval: int = 1,
        session: int = 0,
        held_limit: int = 4096,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.tokenizer = tokenizer
        self.state = "starting"
        self.limits: EngineReady | None = None
        self.stats = EngineStats()
        self.figures = Figures()
        self.observers: list[Observer] = [self.figures.note_end]
        self.after_tokens: list[Callable[[], None]] = []
        self.later: Callable[..., object] = lambda act, *arguments: act(*arguments)
        self.error, self.session = "", session
        self._outbox = Outbox(send, clock)
        self._random = random.Random(seed)
        self._stream_interval = stream_interval
        self._clock = clock
        self._wall_clock = wall_clock
        self._live: dict[int, Request] = {}
        self._next_id = 0
        self._held_limit = held_limit
        self._past_stats = EngineStats()
        self._intake = TokenIntake(
            self._outbox, self.figures, stream_interval=stream_interval, now_s=clock(),
            on_end=self._finish, on_failed=self._fail, on_error=self._break,
        )  # fmt: skip

    @property
    def token_count(self) -> int:
        """Output tokens since start."""
        return self._intake.token_count

    @property
    def live_count(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def arrival(self) -> Timings:
        """The timings of a request that arrives now."""
        return Timings(self._wall_clock(), self._clock())

    # -- requests in ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: "array[int]",
        params: SamplingParams,
        sink: Sink,
        *,
        stream: bool = True,
        starts_text: bool = False,
        priority: int = 0,
        client_key: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
        name: str = "",
        exact_max_tokens: bool = False,
        timings: Timings | None = None,
        pooling: str = "",
        resumed: Sequence[SampleSoFar] | None = None,
    ) -> Request:
        """Check a request and send it to the scheduler.

        Args:
            prompt_token_ids: int32.
            params: as asked for; `max_tokens` and `seed` are filled in here if they are None.
            sink: takes the events.
            stream: send deltas on the way, not only the end.
            starts_text: the output is a text of its own (a chat's answer).
            priority: lower goes first.
            client_key: who asks, for fair sharing.
            cache_salt: cached prefixes are shared only under the same salt.
            timeout_s: seconds from now after which the request ends with an error; None for never.
            name: what the asker calls the request, for the log.
            exact_max_tokens: refuse a `max_tokens` that the context cannot hold, instead of ending at its end.
            timings: from `arrival`, if work was done for the request before now.
            pooling: ask for an embedding of the prompt, with `EMBEDDING_PARAMS`.
            resumed: what has come of a request that an earlier frontend had; it goes on from there. If all of it has
                come, the sink gets its end at once.

        Raises:
            RequestError: it cannot be served; nothing was sent and the sink will not be called.
        """
        limits = self.check_serving()
        check_prompt(prompt_token_ids, limits)
        params = completed(params, limits, len(prompt_token_ids), self._random, resumed, exact=exact_max_tokens)
        end_token_ids = known_end_token_ids(params, limits, self.tokenizer)
        bad_token_ids = known_bad_token_ids(params, limits, self.tokenizer)
        params.check_sampleable(end_token_ids, bad_token_ids)
        timings = timings or self.arrival()
        request = Request(
            request_id=self._allot_id(), prompt_token_ids=prompt_token_ids, params=params, end_token_ids=end_token_ids,
            tokenizer=self.tokenizer, sink=sink, stream=stream, starts_text=starts_text, timings=timings, name=name,
            client_key=client_key, pooling=pooling,
        )  # fmt: skip
        deadline_s = None if timeout_s is None else timings.arrived_at_s + timeout_s
        request.message = AddRequest(
            request_id=request.request_id, prompt_token_ids=prompt_token_ids, params=params,
            end_token_ids=tuple(sorted(end_token_ids)), bad_token_ids=bad_token_ids, priority=priority,
            client_key=client_key, cache_salt=cache_salt, deadline_s=deadline_s, arrived_at_s=timings.arrived_at_s,
            pooling=pooling,
        )  # fmt: skip
        if resumed is not None:
            request.take_up(resumed)
        self._send_new(request)
        return request

    def _send_new(self, request: Request) -> None:
        """The request is live, unless it cannot be sent, or has ended already."""
        self._live[request.request_id] = request
        self._intake.admit(request)
        try:
            if request.open_count:
                self._outbox.request(request)
            else:
                self._finish(request)
        except BaseException:
            self._live.pop(request.request_id, None)
            self._intake.dismiss(request.request_id)
            raise

    def gather(self) -> None:
        """Something has come that may be a request: keep what is submitted from now on for `send_gathered`, or for the
        next message from the scheduler; what has gathered before may go ahead."""
        self._outbox.gather()

    def promise(self, sender: object, follows: bool) -> None:
        """Whether a sender of requests has said that others follow at once those that it has sent."""
        self._outbox.promise(sender, follows)

    def send_gathered(self) -> None:
        """Send the requests that have gathered."""
        self._outbox.flush()

    def abort(self, request_id: int) -> None:
        """End a request: its sink gets `on_final`, open samples as `abort`. Unknown ids are ignored."""
        request = self._live.get(request_id)
        if request is None:
            return
        try:
            self._outbox.abort(request_id)
            for sample in request.samples:
                if sample.finish_reason is None:
                    text = sample.end("abort")
                    if request.stream:
                        request.emit(sample, text, (), self._stream_interval)
            self._finish(request)
        except BaseException as error:
            self._break(request, error)
        self._outbox.flush()

    def fail(self, request_id: int, error: RequestError) -> None:
        """End a request with an error: its sink gets `on_failed`. Unknown ids are ignored."""
        if (request := self._live.get(request_id)) is not None:
            self._give_up(request, error)

    def abort_named(self, name: str | None) -> int:
        """Abort all live requests, or those with this name, or with what follows the first `-` in it.

        Returns:
            How many there were.
        """
        names = {name, name.partition("-")[2]} - {""} if name is not None else None
        ids = [key for key, request in self._live.items() if names is None or request.name in names]
        for request_id in ids:
            self.abort(request_id)
        return len(ids)

    def flush_cache(self) -> None:
        """Have the scheduler forget every cached prefix that no live request holds."""
        self._outbox.flush_cache()

    def check_serving(self) -> EngineReady:
        """The engine's limits.

        Raises:
            RequestError: it is not serving (503), and why. During a restart, only if too many requests wait already.
        """
        waits = self.state == "restarting" and self._outbox.held_count < self._held_limit
        if (self.state == "serving" or waits) and self.limits is not None:
            return self.limits
        raise not_serving(self.state, self.error)

    def _allot_id(self) -> int:
        while True:
            request_id, self._next_id = self._next_id, (self._next_id + 1) & INT32_MAX
            if request_id not in self._live:
                return request_id

    # -- messages from the scheduler -----------------------------------------------------------------------------------

    def handle(self, message: ForFrontend) -> None:
        """Take one message from the scheduler."""
        match message:
            case TokensOut():
                try:
                    self._intake.take(message, self._clock())
                finally:
                    for act in self.after_tokens:
                        act()
                self._outbox.flush()
            case EngineStats():
                self.stats = message.after(self._past_stats)
                self.figures.note_stats(message)
            case RequestFailed():
                if (request := self._live.get(message.request_id)) is not None:
                    self._fail(request, error_of(message))
            case QueueNews():
                self._note_waiting(message.waiting_ids, waits=True)
                self._note_waiting(message.started_ids, waits=False)
            case EngineReady():
                self.limits = message
                if self.state in ("starting", "restarting"):
                    self.state, self.error = "serving", ""
                if self._outbox.suspended:
                    self._outbox.resume(self._live.values())

    def _break(self, request: Request, error: BaseException) -> None:
        """An error of ours, a panic of the tokenizer (no Exception) or a lack of memory ends its own request alone.

        Raises:
            MemoryError: the request's end was made, and may not have reached its client.
        """
        logger.exception("request %d failed in the frontend", request.request_id)
        if self._live.get(request.request_id) is request:
            self._give_up(request, RequestError(f"internal error: {error}", code="internal_error", status=500))
        elif isinstance(error, MemoryError):
            raise error

    def _note_waiting(self, request_ids: Sequence[int], *, waits: bool) -> None:
        for request_id in request_ids:
            if (request := self._live.get(request_id)) is not None:
                request.waits = waits

    # -- restarts ------------------------------------------------------------------------------------------------------

    def suspend(self, why: str, session: int) -> None:
        """Scheduler and worker are restarted: send nothing until they are ready, then go on.

        A request that was lost with them more than once, without a token in between, ends here: it may be the cause,
        unless it was waiting for its first step.
        """
        if self.state == "serving":
            self.state = "restarting"
        self.error, self.session = why, session
        self._outbox.suspended = True
        self._past_stats = self.stats = EngineStats().after(self.stats)
        for request in list(self._live.values()):
            if request.note_loss() >= FRUITLESS_LIMIT:
                text = f"the engine was lost {FRUITLESS_LIMIT} times while it had this request: {why}"
                self._fail(request, RequestError(text, code="engine_restarted", status=503))

    def end_overdue(self, now_s: float | None = None) -> bool:
        """If there is no scheduler to do it, end the requests whose deadline has passed; False if there is one.

        Args:
            now_s: wall clock time; None for now.
        """
        now_s = self._wall_clock() if now_s is None else now_s
        if not self._outbox.suspended:
            return False
        for request in list(self._live.values()):
            deadline_s = request.message.deadline_s if request.message is not None else None
            if deadline_s is not None and deadline_s <= now_s:
                text = "the request's deadline has passed while the engine was being started again"
                self._fail(request, RequestError(text, code="deadline_exceeded", status=408))
        return True

    # -- ends ----------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Take no new requests from now on."""
        if self.state != "dead":
            self.state = "draining"

    def fail_all(self, message: str, *, code: str = "engine_dead", dead: bool = True) -> None:
        """End every live request with an error (503).

        Args:
            message: why.
            code: the error's code.
            dead: the engine cannot serve any more.
        """
        if dead:
            self.state, self.error = "dead", message
        for request in list(self._live.values()):
            if not dead:
                self._outbox.abort(request.request_id)
            self._fail(request, RequestError(message, code=code, status=503))
        self._outbox.flush()

    def _finish(self, request: Request) -> None:
        final = request.final()  # while the request is live: if this fails, it still has its error to come
        self._retire(request)
        request.sink.on_final(final)
        self.later(self._tell_observers, request, str(request.samples[0].finish_reason))

    def _fail(self, request: Request, error: RequestError) -> None:
        self._retire(request)
        request.sink.on_failed(error)
        self.later(self._tell_observers, request, error.code)

    def _give_up(self, request: Request, error: RequestError) -> None:
        """End a request that the scheduler goes on with."""
        self._outbox.abort(request.request_id)
        self._fail(request, error)
        self._outbox.flush()

    def _retire(self, request: Request) -> None:
        request.timings.last_token_s = request.last_token_s
        request.timings.finished_s = self._clock()
        del self._live[request.request_id]
        self._intake.dismiss(request.request_id)
        self._outbox.forget(request.request_id)

    def _tell_observers(self, request: Request, outcome: str) -> None:
        for observer in self.observers:
            observer(request, outcome)
