"""The scheduler's core: messages in, plans and messages out. Deterministic; no sockets, and the clocks are passed in.

    core.handle(message)       a request, an abort, a flush       -> messages for the frontend
    core.tick()                time has passed                    -> messages for the frontend
    core.plan_step(send)       the next step, sent at once        -> StepPlan or None
    core.busy_until_s()        when those in flight should be done
    core.queue_news(arrived)   who waits, who does no more        -> messages for the frontend
    core.handle_result(result) the oldest step's result           -> messages for the frontend
    core.check()               recount everything

The process main calls it with real sockets around it; the simulator and the tests call it without any. The same
messages and times in the same order give the same plans.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict

from common.messages import (
    AbortRequests,
    AbortSamples,
    AddRequest,
    EngineStats,
    FlushCache,
    ForFrontend,
    ForScheduler,
    QueueNews,
    RequestFailed,
    StepPlan,
    StepResult,
)
from scheduler_proc.collector import Collector
from scheduler_proc.grammar import Grammar, GrammarError, Grammars
from scheduler_proc.planner import Planner
from scheduler_proc.sequence import Request, Sequence, Status
from scheduler_proc.state import Limits, State

ENDED_DEADLINES_LIMIT = 64
"""Deadlines of ended requests, beyond one for each live request, that are kept at most."""
RETRY_MIN_MS, RETRY_MAX_MS = 100, 60_000


class SchedulerCore:
    """The scheduler without its process.

    Args:
        limits: what it works within.
        clock: seconds; wall clock time in the process, since deadlines come from another one.
        grammars: for structured outputs; without it requests that want them are refused.
        monotonic: seconds that never go back, for whatever is a difference of times; without it `clock`.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        grammars: Grammars | None = None,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self.limits = limits
        self._grammars = grammars
        self.state = State(limits)
        self._clock = clock
        self._monotonic = monotonic or clock
        self._planner = Planner(self.state)
        self._collector = Collector(self.state)
        self._deadlines: list[tuple[float, int]] = []
        self._finish_interval_s = 1.0  # running mean of the time between two requests that end
        self._finished_at_s: float | None = None
        self._result_at_s = 0.0
        self._started_ids = array("i")

    # ---- messages from the frontend

    def handle(self, message: ForScheduler) -> list[ForFrontend]:
        """Take in a message; what the frontend must hear at once."""
        if isinstance(message, AddRequest):
            if message.request_id in self.state.requests:
                return []  # an id in use: the request that has it goes on
            refusal = self._refusal(message) or self._add(message)
            return [] if refusal is None else [refusal]
        if isinstance(message, AbortRequests):
            self._abort(message)
        elif isinstance(message, AbortSamples):
            self._abort_samples(message)
        elif isinstance(message, FlushCache):
            self.state.cache.flush()
        return []

    def _add(self, message: AddRequest) -> RequestFailed | None:
        """Queue the request's samples, or say what is wrong with its grammar."""
        state = self.state
        try:
            grammars = self._start_grammars(message)
        except GrammarError as error:
            text = f"the structured output cannot be followed: {error}"
            return _failed(message, "invalid_parameter", text[:4000], param="structured_outputs")
        request = Request(message)
        max_len = self._max_len(message)
        namespace = f"{self.limits.namespace}\0{message.cache_salt}"
        for place, (sample_index, output) in enumerate(message.open_samples()):
            sequence = Sequence(request, sample_index, max_len, state.cache.chain(namespace), output)
            sequence.grammar = grammars[place] if grammars else None
            request.sequences.append(sequence)
        request.live_count = len(request.sequences)
        now_s = self._monotonic()
        state.requests[message.request_id] = request
        state.several_samples_count += message.params.n > 1
        state.grammar_count += len(grammars)
        for sequence in request.sequences:
            state.waiting.push(sequence, now_s)
        if message.deadline_s is not None:
            self._note_deadline(message.deadline_s, message.request_id)
        return None

    def _start_grammars(self, message: AddRequest) -> list[Grammar]:
        """One for each sample that is to run, led on to where it stands; none if any output will do."""
        if message.params.structured_outputs is None:
            return []
        if self._grammars is None:
            raise GrammarError("this engine has no grammars")
        return [self._grammars.start(message, output) for _, output in message.open_samples()]

    def _abort(self, message: AbortRequests) -> None:
        for request_id in message.request_ids:
            request = self.state.requests.get(request_id)
            if request is not None:
                self.state.end_request(request)

    def _abort_samples(self, message: AbortSamples) -> None:
        for request_id, sample_index in zip(message.request_ids, message.sample_indices, strict=True):
            request = self.state.requests.get(request_id)
            for sequence in request.sequences if request is not None else ():
                if sequence.sample_index == sample_index and sequence.status is not Status.DONE:
                    self.state.end(sequence)

    def _max_len(self, message: AddRequest) -> int:
        """The length at which the request ends: its own limit, the model's, or what the whole cache holds.

        The last token is only reported: its K/V is never needed.
        """
        prompt_count = len(message.prompt_token_ids)
        longest = min(self.limits.max_model_len, self.limits.block_size * self.limits.block_count + 1)
        return longest if message.params.max_tokens is None else min(longest, prompt_count + message.params.max_tokens)

    def _refusal(self, message: AddRequest) -> RequestFailed | None:
        if not message.prompt_token_ids:
            return _failed(message, "invalid_parameter", "the prompt has no tokens", param="prompt")
        return self._too_long(message) or (None if message.outputs else self._too_many(message))

    def _too_long(self, message: AddRequest) -> RequestFailed | None:
        """The refusal of a request that can never fit."""
        limits = self.limits
        output_count = max(len(output) for _, output in message.open_samples()) if message.outputs else 0
        count = len(message.prompt_token_ids) + output_count
        what = f"the prompt has {count} tokens"
        if output_count:
            what = f"prompt and output have {count} tokens; the engine was started again and holds less than before"
        if count + 1 > limits.max_model_len:
            return _failed(
                message,
                "context_length_exceeded",
                f"{what}; with one token of output that exceeds the context length of {limits.max_model_len}",
                param="prompt",
            )
        pool_tokens = limits.block_count * limits.block_size
        if count > pool_tokens:
            return _failed(
                message,
                "context_length_exceeded",
                f"{what}; the KV cache holds {pool_tokens} ({limits.block_count} blocks of {limits.block_size})",
                param="prompt",
            )
        return None

    def _too_many(self, message: AddRequest) -> RequestFailed | None:
        """The refusal of a new request while as many wait as may."""
        limits, prompt_count = self.limits, len(message.prompt_token_ids)
        waiting_count = self.state.waiting.request_count
        if waiting_count >= limits.max_queued:
            return self._queue_full(message, f"{waiting_count} requests", limits.max_queued)
        waiting_tokens = self.state.waiting.token_count
        if limits.max_queued_tokens and waiting_tokens and waiting_tokens + prompt_count > limits.max_queued_tokens:
            return self._queue_full(message, f"{waiting_tokens} prompt tokens", limits.max_queued_tokens)
        return None

    def _queue_full(self, message: AddRequest, what_waits: str, limit: int) -> RequestFailed:
        text = f"{what_waits} wait already; the limit is {limit}"
        retry_after_ms = int(min(max(self._finish_interval_s * 1000, RETRY_MIN_MS), RETRY_MAX_MS))
        return RequestFailed(message.request_id, "queue_full", text, status=429, retry_after_ms=retry_after_ms)

    # ---- time

    def _note_deadline(self, deadline_s: float, request_id: int) -> None:
        """Remember it; those of ended requests are left in until they are more than the live ones'."""
        heapq.heappush(self._deadlines, (deadline_s, request_id))
        requests = self.state.requests
        if len(self._deadlines) > 2 * len(requests) + ENDED_DEADLINES_LIMIT:
            live = [(at_s, key) for at_s, key in self._deadlines if self._is_deadline(at_s, key)]
            heapq.heapify(live)
            self._deadlines = live

    def _is_deadline(self, deadline_s: float, request_id: int) -> bool:
        """Whether a live request has this id and this deadline: ids are given out again."""
        request = self.state.requests.get(request_id)
        return request is not None and request.message.deadline_s == deadline_s

    def tick(self) -> list[ForFrontend]:
        """End the requests whose deadline has passed."""
        ended: list[ForFrontend] = []
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            deadline_s, request_id = heapq.heappop(self._deadlines)
            if self._is_deadline(deadline_s, request_id):
                self.state.end_request(self.state.requests[request_id])
                message = "the request's deadline has passed"
                ended.append(RequestFailed(request_id, "deadline_exceeded", message, status=408))
        return ended

    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do next."""
        return self._deadlines[0][0] if self._deadlines else None

    # ---- steps

    def plan_step(self, send: Callable[[StepPlan], None] = lambda plan: None) -> StepPlan | None:
        """The next step; None when none may or can be planned now. It is sent with `send`, or by the caller before
        anything else happens."""
        state, count = self.state, len(self.state.in_flight)
        if count > self.limits.run_ahead or not state.has_work:
            return None
        if count and not state.step_time.may_run_ahead(count, state.chunk_tokens_in_flight):
            return None
        plan = self._planner.plan_step(send)
        if plan is not None:
            flight = self.state.in_flight[-1]
            flight.planned_at_s = self._monotonic()
            for slot in plan.new_slots.slots:
                sequence = flight.chunk_sequences[slot]
                sequence.note_start(flight.planned_at_s)
                if sequence.request.told_waiting:
                    sequence.request.told_waiting = False
                    self._started_ids.append(sequence.request_id)
        return plan

    def busy_until_s(self) -> float:
        """When the worker should have computed everything in flight; monotonic seconds."""
        flights, step_time = self.state.in_flight, self.state.step_time
        begun_s = max(flights[0].planned_at_s, self._result_at_s) if flights else self._result_at_s
        return begun_s + sum(step_time.step_s(f.chunk_tokens, decodes=f.decode_count > 0) for f in flights)

    def queue_news(self, arrived_ids: Iterable[int]) -> list[ForFrontend]:
        """What the frontend should know of the queue, once everything is planned that can be.

        Args:
            arrived_ids: requests that have come since the last call.
        """
        waiting_ids = array("i")
        for request_id in arrived_ids:
            request = self.state.requests.get(request_id)
            if request is not None and request.waiting_count == request.live_count:
                request.told_waiting = True
                waiting_ids.append(request_id)
        started_ids, self._started_ids = self._started_ids, array("i")
        return [QueueNews(waiting_ids, started_ids)] if waiting_ids or started_ids else []

    def handle_result(self, result: StepResult) -> list[ForFrontend]:
        """Take in the oldest step's result; what the frontend must hear.

        Raises:
            ResultError: the result does not fit the plans that were sent.
        """
        now_s = self._monotonic()
        flight = self.state.in_flight[0] if self.state.in_flight else None
        out = self._collector.apply(result, now_s)
        if flight is not None:
            step_s = now_s - max(flight.planned_at_s, self._result_at_s)
            self.state.step_time.note(step_s, flight.chunk_tokens, decodes=flight.decode_count > 0)
        self._result_at_s = now_s
        if out is None:
            return []
        if out.finishes:
            self._note_finishes(len(out.finishes))
        return [out]

    def _note_finishes(self, count: int) -> None:
        now = self._monotonic()
        if self._finished_at_s is not None:
            self._finish_interval_s += 0.1 * ((now - self._finished_at_s) / count - self._finish_interval_s)
        self._finished_at_s = now

    def fail_all(self, error_code: str, message: str) -> list[ForFrontend]:
        """End every live request with an error, at shutdown or when the worker is gone."""
        requests = list(self.state.requests.values())
        self._started_ids = array("i")
        for request in requests:
            self.state.end_request(request)
        return [RequestFailed(r.message.request_id, error_code, message, status=503) for r in requests]

    # ---- figures

    @property
    def is_idle(self) -> bool:
        """No request is live and no plan is in flight."""
        return self.state.is_idle

    def stats(self) -> EngineStats:
        """Where the engine stands; without `parts_us` and `step_sizes`, which the process measures."""
        state = self.state
        swapped_count = sum(sequence.status is Status.SWAPPED for sequence in state.preempted)
        return EngineStats(
            running_count=state.running_count,
            waiting_count=len(state.waiting) + len(state.preempted) - swapped_count,
            swapped_count=swapped_count,
            total_block_count=self.limits.block_count,
            free_block_count=state.pool.free_count,
            cached_block_count=state.pool.cached_count,
            evictions=state.pool.evictions,
            **asdict(state.counters),
        )

    def check(self) -> None:
        """Recount everything; raises AssertionError."""
        self.state.check()

    def check_idle(self) -> None:
        """What must hold when idle, without the recount: cheap enough to do each time; raises AssertionError."""
        self.state.check_idle()


def _failed(message: AddRequest, code: str, text: str, param: str | None = None) -> RequestFailed:
    return RequestFailed(message.request_id, code, text, param=param)
