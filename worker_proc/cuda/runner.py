"""Runs step plans on a GPU: one copy in, one graph, one copy out, and never a wait on the main thread.

`execute` packs a plan into pinned memory, issues the step and returns; a reporter's thread waits for the sampled ids.
Plan and ids travel beside the steps (`lanes`); everything else is issued on the main stream, behind the plan's arrival.
Steps may be issued before earlier ones are done: what a step needs of them is on the device. Rows that ask for what the
sampling kernel lacks take `special_rows` on their step. Without a GPU the same code runs in Triton's interpreter, in
tests. The sockets, and when a plan comes, are the worker's business (`worker.py`).
"""

import gc
import logging
import time
from collections import Counter, deque
from functools import partial

import torch

from common.config import StepLimits
from common.messages import StepPlan
from kernels.compile_ahead import KernelsBehind
from kernels.step_layout import PlanLayout
from worker_proc.cuda.block_swap import BlockSwap
from worker_proc.cuda.buckets import Bucket, bucket_of, exact_bucket, first_buckets, start_buckets
from worker_proc.cuda.lanes import Lane, Lanes
from worker_proc.cuda.slot_records import is_penalised
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.cuda.special_rows import SpecialRows
from worker_proc.cuda.staging import WRITE_ROOM, write_apart
from worker_proc.cuda.step_program import Forward, StepProgram
from worker_proc.kv_cache import KVCache
from worker_proc.pending import PendingStep, PromptPiece, prompt_parts
from worker_proc.pooling import Pooler
from worker_proc.slots import SlotMirror, StateWrites
from worker_proc.spans import span
from worker_proc.step_inputs import PackedStep, PromptRows, StepStager

MOST_PADDING = 4096
"""Rows and tokens of padding, in all, with which larger buckets stand in for one without a graph. After that it is
captured at once: that takes about as long as these have."""

logger = logging.getLogger(__name__)


class CudaRunner:
    """Runs steps on one GPU.

    Args:
        forward: the model's pass, on the GPU.
        slots: made for `limits` and the cache's block size.
        vocabulary: ids from here on are never sampled.
        behind: kernels that only buckets beyond the first ones need; they are not prepared before these are there.
        eager: run every step without a graph.

    Attributes:
        swap: moves the cache's blocks.
        pads_steps: whether a step is padded to its bucket, as a graph needs it.
    """

    def __init__(
        self, forward: Forward, cache: KVCache, slots: DeviceSlots, limits: StepLimits, vocabulary: int,
        behind: KernelsBehind | None = None, *, eager: bool,
    ) -> None:  # fmt: skip
        self.swap, self.slots, self._limits = BlockSwap(cache), slots, limits
        self.mirror = SlotMirror(limits.max_num_seqs)
        layout = PlanLayout(limits.max_num_seqs, cache.key_caches[0].shape[0])
        self._lanes = Lanes(layout, slots.device)
        self._stager = StepStager(slots, self.mirror, layout, limits.max_num_batched_tokens)
        self._special = SpecialRows(slots, vocabulary, fixed_order=forward.fixed_order)
        self._may_end_in_rows = not forward.fixed_order
        self._pooler = Pooler(forward.token_hidden, exact=forward.fixed_order)
        self.program = StepProgram(
            forward, cache, slots, self._lanes.plan_buffer, layout,
            max_tokens=limits.max_num_batched_tokens, vocabulary=vocabulary, eager=eager,
        )  # fmt: skip
        self.pads_steps = self.program.uses_graphs
        self._unprepared = deque(start_buckets(limits.max_num_seqs, limits.max_num_batched_tokens))
        self._padding: Counter[Bucket] = Counter()
        self._behind = behind

    def execute(self, plan: StepPlan) -> PendingStep:
        """Carry out a plan, in the order that `StepPlan` gives, as far as issuing it.

        Quicker by some 20 us, after a pause, where inference mode is on already.
        """
        if torch.is_inference_mode_enabled():
            return self._execute(plan)
        with torch.inference_mode():
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> PendingStep:
        start = time.perf_counter_ns()
        lane = self._lanes.take()
        with span("input"):
            packed = self._prepare(plan, lane)
        input_us = (time.perf_counter_ns() - start) // 1000
        step = PendingStep(plan.step_id, partial(self._lanes.read, lane, packed.sampled_rows, input_us))
        if packed.token_count:
            bucket = self._bucket(packed)
            with span("forward"):  # with the sampling, which is in the same graph
                step = self._run(step, packed, bucket)
                if packed.pooled_rows:
                    step = step._replace(embeddings=self._pooler.pool(packed.pooled_rows))
        lane.end(self.program.sampled.ids)
        return step

    def warm_up(self) -> None:
        """Prepare what is to be ready before the first request; `prepare_next` does what is left.

        Raises:
            CaptureError: graphs do not work here.
        """
        gc.collect()
        gc.freeze()  # a capture collects garbage; what is alive by now need not be looked at each time
        for _ in first_buckets(self._limits.max_num_seqs, self._limits.max_num_batched_tokens):
            self._prepare_first()

    @property
    def unprepared_count(self) -> int:
        """Buckets that `prepare_next` has yet to capture."""
        return len(self._unprepared)

    def prepare_next(self) -> bool:
        """Capture the next bucket of start-up, or one that steps have come for since, on an empty plan: nothing is
        computed or stored. Takes 20 to 30 ms, on a slow host up to 0.1 s.

        One that fails is the last: a step may do without what is prepared here, and meets itself what it cannot do
        without, such as a device that still works.

        Returns:
            Whether there are more.
        """
        try:
            return self._prepare_next()
        except Exception as error:
            logger.warning("steps are not prepared any more (%d were left): %s", len(self._unprepared), error)
            self._unprepared.clear()
            return False

    def _prepare_next(self) -> bool:
        if self._unprepared and self._has_kernels():
            self._prepare_first()
        return bool(self._unprepared)

    @torch.inference_mode()
    def _prepare_first(self) -> None:
        self.program.prepare(self._unprepared.popleft())

    def _has_kernels(self) -> bool:
        """Whether a bucket can be captured without compiling."""
        return self._behind is None or self._behind.ready()

    def _bucket(self, packed: PackedStep) -> Bucket:
        """What the step runs in. A capture takes as long as several steps, so a bucket without a graph is captured in
        the next pause, and a larger one stands in for it until then, or until that has cost as much; always for one
        that cannot be captured any more. `_prompt_pieces` and the pooler ask for tokens beside those that sample; rules
        and log probabilities of what is sampled do not."""
        sizes = (packed.decode_row_count, packed.row_count - packed.decode_row_count, packed.token_count)
        every_token = self._may_end_in_rows and bool(packed.prompt_rows or packed.pooled_rows)
        if not self.pads_steps:
            return exact_bucket(*sizes, every_token=every_token)
        limits = self._limits
        bucket = bucket_of(
            *sizes, max_rows=limits.max_num_seqs, max_tokens=limits.max_num_batched_tokens, every_token=every_token
        )
        if self.program.has_graph(bucket):
            return bucket
        stand_in = self.program.stand_in(bucket)
        if stand_in is None and not self._has_kernels():  # a graph's kernels serve its size with every token, too
            alike = self.program.stand_in(bucket._replace(every_token=False))
            return bucket if alike is None else alike._replace(every_token=every_token)
        is_due = self._padding[bucket] > MOST_PADDING
        if stand_in is None or (is_due and self.program.takes_graph(bucket) and self._has_kernels()):
            return bucket
        if bucket not in self._padding:
            self._unprepared.appendleft(bucket)
        self._padding[bucket] += stand_in.rows - bucket.rows + stand_in.tokens - bucket.tokens
        return stand_in

    def _prepare(self, plan: StepPlan, lane: Lane) -> PackedStep:
        """Everything that changes before the rows run, and the copy of the plan.

        The step begins behind what the host does alone: an idle device does not wait for that in the step's time.
        """
        changes = self._stager.change_slots(plan)
        packed = self._stager.pack(plan, lane.plan.words)
        writes = changes if changes.count <= WRITE_ROOM else StateWrites(self.slots)
        lane.begin(packed.size, writes)
        self.swap.move(plan)
        if writes is not changes:
            write_apart(self.slots.memory, changes)
        if writes.count and self._reads_slots_first(plan):
            self.program.write_slots()
        if plan.masks:
            self.slots.set_masks(plan.mask_slots, plan.masks)
        if plan.new_slots:
            self._special.start(plan.new_slots)
            self._pooler.start(plan.new_slots)
        return packed

    @staticmethod
    def _reads_slots_first(plan: StepPlan) -> bool:
        """Whether what new slots start with cannot wait for the step itself, which writes it if it has chunks."""
        return not plan.chunk_slots or bool(plan.masks) or any(map(is_penalised, plan.new_slots.samplings))

    def _run(self, step: PendingStep, packed: PackedStep, bucket: Bucket) -> PendingStep:
        if not packed.prompt_rows and not self._special.any_of(packed):
            self.program.run(bucket)
            return step
        logits = self.program.run(bucket, sampling=False)
        pieces = tuple(piece for rows in packed.prompt_rows for piece in self._prompt_pieces(rows))
        wanted = self._logprob_rows(packed)
        raw = logits.clone() if wanted else None
        self._special.apply_rules(logits, packed.sampled_pairs())
        self.program.sample(bucket, logits)
        table = None
        if raw is not None:
            ids = self.program.sampled.ids[: bucket.rows]
            table = self._special.logprobs(raw, ids, max(top_count for _, _, top_count in wanted))
        return step._replace(logprob_rows=wanted, logprobs=table, prompt_pieces=pieces)

    def _logprob_rows(self, packed: PackedStep) -> tuple[tuple[int, int, int], ...]:
        """See `PendingStep`."""
        found = []
        for index, (row, slot) in enumerate(packed.sampled_pairs()):
            sampling = self.mirror.sampling[slot]
            if sampling is not None and sampling.logprobs >= 0:
                found.append((row, index, sampling.logprobs))
        return tuple(found)

    def _prompt_pieces(self, rows: PromptRows) -> list[PromptPiece]:
        """Of a chunk's tokens that predict a prompt token; a few rows of logits at a time."""
        sampling = self.mirror.sampling[rows.slot]
        assert sampling is not None, f"slot {rows.slot} is free"
        pieces = []
        for token, count, position in prompt_parts(rows):
            logits = self.program.token_logits(token, count)
            predicted = self.slots.token_ids[rows.slot, position : position + count]
            table = self._special.logprobs(logits, predicted, sampling.prompt_logprobs)
            pieces.append(PromptPiece(rows.slot, position, sampling.prompt_logprobs, table))
        return pieces
