"""Decides when the next step is planned: at once, or when more of the requests are here that are on their way.

A batch of prompts takes longer to arrive than a short step takes to run. An idle worker gets its first step as soon as
what has come makes a good one, and what follows is taken in while it computes. A batch that is smaller than that shares
its first step. The rules:

    worker      waits for more requests while                              but no longer than
    idle        more of a batch follows, and the step would be small       FIRST_WAIT_S, LONGEST_WAIT_S in all
    has its     the step would not be full: prompts often come right       HOLD_S
    first step  behind one another
    has steps   more follows, and the step would not be full               LEAD_S before the worker has nothing to do

Nobody waits for requests that no slot is free for.

No sockets; the clock is passed in. Called by the process's loop.
"""

from collections.abc import Callable

from common.messages import AddRequest, ForScheduler, MoreFollows, StepPlan
from scheduler_proc.core import SchedulerCore

GOOD_STEP_TOKENS = 2048
GOOD_STEP_REQUESTS = 64
"""A step with so many prompt tokens, or of so many requests, is worth beginning with: a GPU computes it while
as many again arrive."""
FIRST_WAIT_S = MoreFollows.BELIEVED_S
"""How long the word that more follow is believed, from the last message on. The frontend says so when nothing follows
after all, so this is for one that is stuck, and for clients that end in the middle of a batch."""
LONGEST_WAIT_S = 0.05
"""How long an idle worker waits in all: whoever has one request does not wait longer for others' batches, whatever they
say they have."""
HOLD_S = 0.0005
"""How long the next step waits after a step with a prompt has gone to an idle worker (up to a millisecond longer in a
poll that sleeps, which waits whole milliseconds). Prompts that arrive right behind the first one can then join the
second step, instead of waiting until two decode steps of the first have run. The worker does not idle: a step with a
prompt usually takes longer than this, and if it does not, its result ends the wait."""
LEAD_S, REQUEST_LEAD_S = 0.001, 0.00004
"""Before the worker has nothing to do, the next step has to be planned, sent and read; more for each request in it."""
REST_WAIT_S = 0.004
"""What is known of steps is a mean of those so far: no step waits for longer after the one before it."""
IDLE_INTAKE, BUSY_INTAKE = 256, 16
"""Requests taken in before the loop looks after everything else: with an idle worker, and with one that computes."""


class Pacing:
    """When to plan.

    Args:
        core: whose steps.
        clock: monotonic seconds.
    """

    def __init__(self, core: SchedulerCore, clock: Callable[[], float]) -> None:
        self._core, self._state = core, core.state
        self._clock = clock
        self._promised_until_s = 0.0  # monotonic: until when it is believed that more follow; 0: it was not said
        self._is_left = False  # the last intake was broken off
        self._waits_since_s = 0.0  # since when an idle worker waits; 0: it does not
        self._until_s = 0.0  # until when the step behind the first one waits in any case; 0: it does not
        self._wake_at_s = 0.0  # until when it waits now

    # ---- what has happened

    def note_message(self, message: ForScheduler) -> bool:
        """A message has come from the frontend; whether it was meant for this object alone."""
        if isinstance(message, MoreFollows):
            self._promised_until_s = self._clock() + FIRST_WAIT_S if message.follows else 0.0
            return True
        if isinstance(message, AddRequest):
            self._promised_until_s = 0.0
        return False

    def note_result(self) -> None:
        """A step's result has come."""
        self._until_s = 0.0

    def note_plan(self, plan: StepPlan) -> None:
        """A step has been planned and sent."""
        is_first = len(self._state.in_flight) == 1
        self._until_s = self._clock() + HOLD_S if is_first and plan.chunk_slots else 0.0

    # ---- what to do

    def intake_ends(self, count: int) -> bool:
        """Whether to plan before any more is taken in than these `count` messages."""
        if self._state.in_flight:
            self._is_left = count >= BUSY_INTAKE
        else:
            self._is_left = count >= IDLE_INTAKE or self._is_good_step()
        return self._is_left

    def begin_intake(self) -> None:
        """The frontend's messages are taken in next, as many as there are until `intake_ends`."""
        self._is_left = False

    def holds(self) -> bool:
        """Whether the next step waits."""
        self._wake_at_s = self._ends_s()
        return self.is_holding

    @property
    def is_holding(self) -> bool:
        """What `holds` said last."""
        return self._wake_at_s > 0.0

    def wait_s(self) -> float | None:
        """Seconds until something is to be done here without another message; None if nothing is."""
        if self._is_left:
            return 0.0
        return self._wake_at_s - self._clock() if self._wake_at_s else None

    def _ends_s(self) -> float:
        """Until when the next step waits; 0 if it does not."""
        state, now_s = self._state, self._clock()
        more_follows = bool(state.free_slots) and (self._is_left or now_s < self._promised_until_s)
        if not state.in_flight:
            return self._first_ends_s(now_s) if more_follows else self._idle_ends()
        if self._fills(self._step_tokens()):
            return 0.0
        until_s = self._until_s
        if more_follows and not state.prefilling:
            last_s = self._last_moment_s()
            until_s = max(until_s, last_s if self._is_left else min(last_s, self._promised_until_s))
        return until_s if now_s < until_s else 0.0

    def _first_ends_s(self, now_s: float) -> float:
        """An idle worker waits for the rest of a batch; if that does not come in time, it goes without it."""
        self._waits_since_s = self._waits_since_s or now_s
        end_s = self._waits_since_s + LONGEST_WAIT_S
        if not self._is_left:
            end_s = min(end_s, self._promised_until_s)
        return end_s if now_s < end_s and not self._is_good_step() else self._idle_ends()

    def _idle_ends(self) -> float:
        """An idle worker waits no longer."""
        self._waits_since_s = 0.0
        return 0.0

    def _last_moment_s(self) -> float:
        """When the step after those in flight has to be planned."""
        lead_s = LEAD_S + REQUEST_LEAD_S * self._state.waiting.request_count
        return min(self._core.busy_until_s() - lead_s, self._state.in_flight[-1].planned_at_s + REST_WAIT_S)

    def _is_good_step(self) -> bool:
        """Whether a step of what has come is worth beginning with."""
        most = min(GOOD_STEP_REQUESTS, len(self._state.free_slots))
        return self._state.waiting.request_count >= most or self._fills(min(GOOD_STEP_TOKENS, self._step_tokens()))

    def _fills(self, token_count: int) -> bool:
        return self._state.waiting.token_count >= token_count

    def _step_tokens(self) -> int:
        return self._state.step_time.chunk_budget(self._core.limits.max_num_batched_tokens, decodes=False)
