"""The scheduler's core with a simulated worker, in one thread: for tests and for benchmarks.

`SimulatedWorker` carries out plans to the letter. Where a real worker stores K/V it stores (token, position), and it
draws each token from a hash of the whole prefix *as it reads it back through the slot's block table*. So a wrong table,
a block reused too early, a skipped copy or a stale prefix hit changes the output, and `expected_tokens` says what it
should have been. `SimulatedEngine` connects core and worker through encoded messages and keeps what the frontend would
see.
"""

from array import array
from collections import deque
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import replace
from typing import Any

import xxhash

from common.messages import (
    AddRequest,
    ForScheduler,
    RequestFailed,
    SlotInit,
    SlotSampling,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokensOut,
    decode_for_frontend,
    decode_for_scheduler,
    decode_for_worker,
    decode_from_worker,
)
from common.sampling_params import SamplingParams
from scheduler_proc.core import SchedulerCore
from scheduler_proc.prefix_cache import Chain
from scheduler_proc.sequence import Request, Sequence, shared_sampling, slot_seed
from scheduler_proc.state import Limits

VOCAB_SIZE = 997


def draw_token(prefix: SequenceABC[int], sampling: SlotSampling, output_count: int) -> int:
    """The token that follows the prefix: a hash of prefix and seed, no end token before its time."""
    token = xxhash.xxh64_intdigest(array("i", prefix).tobytes(), sampling.seed) % VOCAB_SIZE
    while output_count < sampling.min_output_count and token in sampling.end_token_ids:
        token = (token + 1) % VOCAB_SIZE
    return token


def expected_tokens(prompt: SequenceABC[int], sampling: SlotSampling, max_tokens: int) -> list[int]:
    """What a request must give, whatever runs beside it."""
    tokens = list(prompt)
    for output_count in range(max_tokens):
        tokens.append(draw_token(tokens, sampling, output_count))
        if tokens[-1] in sampling.end_token_ids:
            break
    return tokens[len(prompt) :]


def simple_request(
    request_id: int, prompt: Iterable[int], max_tokens: int = 8, end: Iterable[int] = (), **params: Any
) -> AddRequest:
    """A request whose seed is its id."""
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=array("i", prompt),
        params=SamplingParams(max_tokens=max_tokens, seed=request_id, **params),
        end_token_ids=tuple(end),
    )


def expected_outputs(messages: Iterable[AddRequest], max_len: int = 1 << 30) -> dict[tuple[int, int], list[int]]:
    """What all samples of the requests must give, by request id and sample."""
    outputs = {}
    for message in messages:
        prompt, params = message.prompt_token_ids, message.params
        limit = min(params.max_tokens or max_len, max_len - len(prompt))
        for sample_index in range(params.n):
            sequence = Sequence(Request(message), sample_index, 0, Chain(-1))
            sampling = shared_sampling(sequence).with_seed(slot_seed(sequence))
            outputs[message.request_id, sample_index] = expected_tokens(prompt, sampling, limit)
    return outputs


class Slot:
    """What the worker keeps of a request."""

    __slots__ = ("blocks", "computed_count", "prompt_count", "sampling", "tokens")

    def __init__(self, init: SlotInit) -> None:
        self.tokens = list(init.token_ids)
        self.prompt_count = init.prompt_count
        self.computed_count = init.computed_count
        self.blocks = list(init.block_ids)
        self.sampling = init.sampling


class SimulatedWorker:
    """Carries out step plans, and refuses those that break the contract of `StepPlan`.

    Args:
        block_size, block_count, host_block_count: its KV cache and swap pool.
    """

    def __init__(self, block_size: int, block_count: int, host_block_count: int = 0) -> None:
        self.block_size = block_size
        self.slots: dict[int, Slot] = {}
        self.computed_tokens = 0
        self.copied_blocks = 0
        self.swapped_out_blocks = 0
        self._blocks = [[(-1, -1)] * block_size for _ in range(block_count)]
        self._host_blocks = [[(-1, -1)] * block_size for _ in range(host_block_count)]
        self._last_step = 0

    def run(self, plan: StepPlan) -> StepResult:
        """The step, in the order that `StepPlan` states."""
        assert plan.step_id == self._last_step + 1, f"step {plan.step_id} follows {self._last_step}"
        self._last_step = plan.step_id
        for slot in plan.cleared_slots:
            del self.slots[slot]
        for device, host in _pairs(plan.swap_out_block_ids):
            self._host_blocks[host] = self._blocks[device].copy()
        self.swapped_out_blocks += len(plan.swap_out_block_ids) // 2
        self._copy(plan)
        for host, device in _pairs(plan.swap_in_block_ids):
            self._blocks[device] = self._host_blocks[host].copy()
        for init in plan.new_slots:
            assert init.slot not in self.slots, f"slot {init.slot} is in use"
            self.slots[init.slot] = Slot(init)
        rows = [*plan.decode_slots, *plan.chunk_slots]
        assert len(set(rows)) == len(rows), "a slot stands in two rows"
        assert plan.token_count > 0 or plan.swap_out_block_ids, "an empty step"
        self._append_blocks(plan)
        prompt_logprobs = self._compute(plan)
        return self._sample(plan, prompt_logprobs)

    def _copy(self, plan: StepPlan) -> None:
        pairs = _pairs(plan.copy_block_ids)
        written = [destination for _, destination in pairs]
        assert len(set(written)) == len(written), "two copies go to one block"
        assert not set(written) & {source for source, _ in pairs}, "a copy reads what another one writes"
        for source, destination in pairs:
            self._blocks[destination] = self._blocks[source].copy()
        self.copied_blocks += len(pairs)

    def _append_blocks(self, plan: StepPlan) -> None:
        counts = [*(plan.decode_block_counts or [0] * len(plan.decode_slots)), *plan.chunk_block_counts]
        blocks = iter(plan.block_ids)
        for slot, count in zip([*plan.decode_slots, *plan.chunk_slots], counts, strict=True):
            self.slots[slot].blocks += [next(blocks) for _ in range(count)]

    def _compute(self, plan: StepPlan) -> list[tuple[int, tuple[TokenLogprobs, ...]]]:
        users: dict[int, int] = {}
        for slot in self.slots.values():
            for block in slot.blocks:
                users[block] = users.get(block, 0) + 1
        for number in plan.decode_slots:
            slot = self.slots[number]
            assert slot.computed_count == len(slot.tokens) - 1, f"slot {number} decodes before its prompt is computed"
            self._store(slot, 1, users)
        prompt_logprobs = []
        for number, count, samples in zip(plan.chunk_slots, plan.chunk_token_counts, plan.chunk_samples, strict=True):
            slot = self.slots[number]
            first = slot.computed_count
            self._store(slot, count, users)
            assert bool(samples) == (slot.computed_count == len(slot.tokens)), (
                f"slot {number} samples too early or late"
            )
            if slot.sampling.prompt_logprobs >= 0:
                prompt_logprobs.append((number, self._prompt_logprobs(slot, first)))
        return prompt_logprobs

    def _store(self, slot: Slot, count: int, users: dict[int, int]) -> None:
        for position in range(slot.computed_count, slot.computed_count + count):
            block = slot.blocks[position // self.block_size]
            assert users[block] == 1, f"block {block} is written while {users[block]} slots share it"
            self._blocks[block][position % self.block_size] = (slot.tokens[position], position)
        slot.computed_count += count
        self.computed_tokens += count

    def _prefix(self, slot: Slot, count: int) -> list[int]:
        size = self.block_size
        entries = [self._blocks[slot.blocks[position // size]][position % size] for position in range(count)]
        assert all(entry[1] == position for position, entry in enumerate(entries)), "K/V of another position"
        return [token for token, _ in entries]

    def _prompt_logprobs(self, slot: Slot, first: int) -> tuple[TokenLogprobs, ...]:
        last = min(slot.computed_count, slot.prompt_count - 1)
        return tuple(_logprob(position, self._prefix(slot, position)) for position in range(first + 1, last + 1))

    def _sample(self, plan: StepPlan, prompt_logprobs: list[tuple[int, tuple[TokenLogprobs, ...]]]) -> StepResult:
        sampled: array[int] = array("i")
        logprobs = []
        for index, number in enumerate(plan.sampled_slots):
            slot = self.slots[number]
            prefix = self._prefix(slot, len(slot.tokens))
            token = draw_token(prefix, slot.sampling, len(slot.tokens) - slot.prompt_count)
            if slot.sampling.logprobs >= 0:
                logprobs.append(_logprob(index, [*prefix, token]))
            slot.tokens.append(token)
            sampled.append(token)
        return StepResult(
            step_id=plan.step_id,
            token_ids=sampled,
            logprobs=tuple(logprobs),
            prompt_logprobs=tuple(prompt_logprobs),
            parts_us=array("i", [1, 2, 3, 4]),
        )


def _logprob(row_index: int, prefix: list[int]) -> TokenLogprobs:
    value = xxhash.xxh64_intdigest(array("i", prefix).tobytes()) % 1024
    return TokenLogprobs(row_index, -float(value), 1, array("i", [value]), array("f", [-float(value)]))


def _pairs(numbers: "array[int]") -> list[tuple[int, int]]:
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class SimulatedEngine:
    """Core and worker, with every message encoded and decoded, and the frontend's view of the outcome.

    A plan is carried out when it is planned; its result waits in `results` until `deliver`.

    Args:
        limits: the core's.
        clock, monotonic: the core's; stand still by default.

    Attributes:
        outputs: (request id, sample) -> token ids so far.
        reasons: (request id, sample) -> finish reason, of samples that ended.
        failures: request id -> its RequestFailed.
        cached_counts: (request id, sample) -> prompt tokens from the cache.
        logprobs, prompt_logprobs: (request id, sample) -> entries.
        max_plan_bytes: the longest plan so far.
    """

    def __init__(
        self, limits: Limits, clock: Callable[[], float] = lambda: 0.0, monotonic: Callable[[], float] | None = None
    ) -> None:
        self._limits, self._clock, self._monotonic = limits, clock, monotonic
        self._start()
        self.outputs: dict[tuple[int, int], list[int]] = {}
        self.reasons: dict[tuple[int, int], str] = {}
        self.failures: dict[int, RequestFailed] = {}
        self.cached_counts: dict[tuple[int, int], int] = {}
        self.logprobs: dict[tuple[int, int], list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[tuple[int, int], tuple[TokenLogprobs, ...]] = {}
        self.plans = 0
        self.max_plan_bytes = 0

    def _start(self) -> None:
        limits = self._limits
        self.core = SchedulerCore(limits, self._clock, monotonic=self._monotonic)
        self.worker = SimulatedWorker(limits.block_size, limits.block_count, limits.host_block_count)
        self.results: deque[StepResult] = deque()
        self._used_blocks: deque[set[int]] = deque()

    def restart(self, messages: Iterable[AddRequest], aborted: Container[tuple[int, int]] = ()) -> None:
        """Core and worker are lost with all that is in flight; new ones go on with what is left of these requests.

        Args:
            messages: those that were not aborted.
            aborted: samples that were, by request id and index.
        """
        self._start()
        for message in messages:
            keys = [(message.request_id, index) for index in range(message.params.n)]
            ended = [key in self.reasons or key in aborted for key in keys]
            outputs = tuple(
                None if over else array("i", self.outputs.get(key, ())) for key, over in zip(keys, ended, strict=True)
            )
            if message.request_id not in self.failures and any(output is not None for output in outputs):
                for key in keys:
                    self.cached_counts.pop(key, None)
                self.send(replace(message, outputs=outputs))

    def send(self, message: ForScheduler) -> None:
        """A message from the frontend."""
        for out in self.core.handle(decode_for_scheduler(message.to_wire())):
            self._hear(out)

    def tick(self) -> None:
        """The clock has moved."""
        for out in self.core.tick():
            self._hear(out)

    def plan(self) -> StepPlan | None:
        """Plan and carry out one step, if one can be planned."""
        plan = self.core.plan_step()
        if plan is None:
            return None
        data = plan.to_wire()
        self.plans += 1
        self.max_plan_bytes = max(self.max_plan_bytes, len(data))
        taken = self._taken_blocks(plan)
        assert not taken & set().union(*self._used_blocks), "a block is taken while a plan in flight uses it"
        self.results.append(self.worker.run(decode_for_worker(data)))
        rows = [*plan.decode_slots, *plan.chunk_slots]
        used = {block for slot in rows for block in self.worker.slots[slot].blocks}
        used |= {*plan.copy_block_ids, *plan.swap_out_block_ids[::2], *plan.swap_in_block_ids[1::2]}
        used |= {-1 - host for host in (*plan.swap_out_block_ids[1::2], *plan.swap_in_block_ids[::2])}
        self._used_blocks.append(used)
        return plan

    def _taken_blocks(self, plan: StepPlan) -> set[int]:
        """Blocks that the plan gives a new content; the host's are counted from -1 downwards."""
        size = self.worker.block_size
        starts = [block for init in plan.new_slots for block in init.block_ids[-(-init.computed_count // size) :]]
        host = [-1 - block for block in plan.swap_out_block_ids[1::2]]
        return {*starts, *plan.block_ids, *plan.copy_block_ids[1::2], *plan.swap_in_block_ids[1::2], *host}

    def deliver(self, change: Callable[[StepResult], StepResult] = lambda result: result) -> bool:
        """Hand the oldest result to the core, changed if the test wants to; False if there is none."""
        if not self.results:
            return False
        self._used_blocks.popleft()
        result = decode_from_worker(change(self.results.popleft()).to_wire())
        assert isinstance(result, StepResult)
        for out in self.core.handle_result(result):
            self._hear(out)
        return True

    def step(self) -> bool:
        """Plan as far ahead as allowed, then deliver one result; False when nothing is left to do."""
        while self.plan() is not None:
            pass
        return self.deliver()

    def run(self, step_limit: int = 100_000) -> None:
        """Step until idle, then recount. A scheduler that makes no progress fails here."""
        for _ in range(step_limit):
            if not self.step():
                break
        assert self.core.is_idle, f"stuck with live requests {sorted(self.core.state.requests)}"
        self.core.check()

    def _hear(self, message: object) -> None:
        decoded = decode_for_frontend(message.to_wire())  # type: ignore[attr-defined]
        if isinstance(decoded, RequestFailed):
            assert decoded.request_id not in self.failures, f"request {decoded.request_id} fails twice"
            self.failures[decoded.request_id] = decoded
        elif isinstance(decoded, TokensOut):
            self._hear_tokens(decoded)

    def _hear_tokens(self, out: TokensOut) -> None:
        row_count = len(out.request_ids)
        samples = out.sample_indices or array("B", bytes(row_count))
        counts = out.token_counts or array("B", b"\1") * row_count
        keys = list(zip(out.request_ids, samples, strict=True))
        assert len(set(keys)) == row_count, "a sample has two rows"
        tokens = iter(out.token_ids)
        token_keys = []
        for key, count in zip(keys, counts, strict=True):
            assert key not in self.reasons and key[0] not in self.failures, f"{key} goes on after its end"
            self.outputs.setdefault(key, []).extend(next(tokens) for _ in range(count))
            token_keys += [key] * count
        for key, cached in zip(keys, out.cached_counts, strict=False):
            if cached >= 0:
                assert key not in self.cached_counts, f"{key} starts twice"
                self.cached_counts[key] = cached
        for finish in out.finishes:
            assert keys[finish.row_index] not in self.reasons, f"{keys[finish.row_index]} ends twice"
            self.reasons[keys[finish.row_index]] = finish.reason
        for entry in out.logprobs:
            self.logprobs.setdefault(token_keys[entry.row_index], []).append(entry)
        for row_index, entries in out.prompt_logprobs:
            self.prompt_logprobs[keys[row_index]] = entries
