"""Runs step plans on one device: slots, cache and model, from a `StepPlan` to what it sampled.

A step is three actions: the packed plan goes to the device, the step runs there on buffers at fixed addresses, the
sampled ids come back. This is the CPU's runner, where the first and the last cost nothing and the device's part of the
step inputs and the sampling are NumPy. The sockets, and when a plan comes, are the worker's business (`worker.py`).
"""

import itertools
import time
from array import array
from dataclasses import dataclass

import numpy as np
import torch

from common.config import StepLimits
from common.messages import SlotInit, SlotSampling, StepPlan, StepResult, TokenLogprobs
from kernels.step_layout import StepInputs
from worker_proc.forward_context import ForwardContext
from worker_proc.kv_cache import KVCache
from worker_proc.logprobs import logprob_row
from worker_proc.models.llama import LlamaForCausalLM
from worker_proc.sampler import Sampler
from worker_proc.slots import SlotMemory, SlotMirror, StateWrites
from worker_proc.step_inputs import PromptRows, StagedStep, StepStager, fill_inputs

PROMPT_LOGPROB_ROWS = 64
"""Positions whose logits are computed at once for prompt log probabilities; bounds their memory."""


@dataclass(frozen=True)
class StepTimes:
    """Nanosecond clock readings between the parts of a step."""

    start: int
    prepared: int
    computed: int
    sampled: int

    def parts_us(self, report_us: int) -> "array[int]":
        """In the order of STEP_PARTS; plan and wire are the scheduler's."""
        marks = (self.start, self.prepared, self.computed, self.sampled)
        spans = [(end - start) // 1000 for start, end in itertools.pairwise(marks)]
        return array("i", [0, 0, *spans, report_us])


class CpuRunner:
    """Runs steps on the CPU.

    Args:
        model: in its final form, on the CPU.
        cache: with `block_size` tokens a block.
        max_model_len: tokens that a slot may hold.
        tokenizer_vocab_size: ids from here on are never sampled.
    """

    def __init__(
        self, model: LlamaForCausalLM, cache: KVCache, limits: StepLimits, max_model_len: int, tokenizer_vocab_size: int
    ) -> None:
        self._model, self._cache = model, cache
        self._vocab_size = tokenizer_vocab_size
        self.memory = SlotMemory(limits.max_num_seqs, max_model_len, cache.block_size, torch.device("cpu"))
        self.mirror = SlotMirror.empty(limits.max_num_seqs)
        self._stager = StepStager(self.memory, self.mirror)
        self._inputs = StepInputs.allocate(limits.max_num_seqs, limits.max_num_batched_tokens, "cpu")
        self._sampler = Sampler(self.memory, self.mirror, tokenizer_vocab_size)
        self._report_us = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out a plan, in the order that `StepPlan` gives, and return what it sampled."""
        start = time.perf_counter_ns()
        staged = self._prepare(plan)
        inputs = self._fill(staged)
        prepared = time.perf_counter_ns()
        with torch.inference_mode():
            hidden = self._model(inputs.token_ids, inputs.positions, self._context(inputs, staged.decode_row_count))
            logits = self._model.compute_logits(self._sampled_hidden(hidden, inputs, staged))
            prompt_logprobs = tuple((rows.slot, self._prompt_logprobs(hidden, rows)) for rows in staged.prompt_rows)
        computed = time.perf_counter_ns()
        sampled = self._sampler.sample(logits.numpy(), staged.sampled_slots, staged.sampled_positions)
        times = StepTimes(start, prepared, computed, time.perf_counter_ns())
        return StepResult(
            step_id=plan.step_id,
            token_ids=array("i", sampled.token_ids.tobytes()),
            logprobs=tuple(row.entry(index) for index, row in sampled.logprobs),
            prompt_logprobs=prompt_logprobs,
            parts_us=times.parts_us(self._report_us),
        )

    def note_report(self, report_us: int) -> None:
        """How long the last result took to send; the next one carries it."""
        self._report_us = report_us

    def warm_up(self) -> None:
        """One prompt and one decode step in slot 0 and block 0, so that nothing is done for the first time later."""
        count = max(1, min(self._cache.block_size - 1, self.memory.token_capacity - 2))
        init = SlotInit(
            slot=0, token_ids=array("i", [0] * count), prompt_count=count, computed_count=0, block_ids=array("i", [0]),
            sampling=SlotSampling(),
        )  # fmt: skip
        chunk = StepPlan(
            step_id=1, new_slots=(init,), chunk_slots=array("H", [0]), chunk_token_counts=array("i", [count]),
            chunk_samples=array("B", [1]), chunk_block_counts=array("i", [0]),
        )  # fmt: skip
        self.execute(chunk)
        if self._cache.block_size > count:
            self.execute(StepPlan(step_id=2, decode_slots=array("H", [0])))
        self.mirror.clear(0)

    def _prepare(self, plan: StepPlan) -> StagedStep:
        """Everything that changes before the rows run."""
        for slot in plan.cleared_slots:
            self.mirror.clear(slot)
        if plan.swap_out_block_ids:
            self._cache.swap_out(_pairs(plan.swap_out_block_ids))
        if plan.copy_block_ids:
            self._cache.copy_blocks(torch.tensor(_pairs(plan.copy_block_ids)))
        if plan.swap_in_block_ids:
            self._cache.swap_in(_pairs(plan.swap_in_block_ids))
        writes = StateWrites(self.memory)
        for init in plan.new_slots:
            self.mirror.start(init)
            self._sampler.start(init)
            writes.add_slot(init)
        return self._stager.stage(plan, writes)

    def _fill(self, staged: StagedStep) -> StepInputs:
        buffer = torch.from_numpy(staged.buffer)
        addresses, values = (buffer[part] for part in staged.write_parts)
        self.memory.apply(addresses, values)
        inputs = self._inputs.bucket(staged.row_count, staged.token_count)
        fill_inputs(staged.buffer, staged.layout, self.memory.state, inputs, self._cache.block_size)
        return inputs

    def _context(self, inputs: StepInputs, decode_row_count: int) -> ForwardContext:
        prompt_lengths = None
        if self._model.rotary.length_dependent:
            prompt_lengths = self.memory.prompt_lengths[inputs.row_slots.long()]
        return ForwardContext(
            slot_mapping=inputs.slot_mapping,
            row_slots=inputs.row_slots,
            query_starts=inputs.query_starts,
            context_lengths=inputs.context_lengths,
            block_tables=self.memory.block_tables,
            key_caches=self._cache.key_caches,
            value_caches=self._cache.value_caches,
            block_size=self._cache.block_size,
            decode_row_count=decode_row_count,
            prompt_lengths=prompt_lengths,
        )

    def _sampled_hidden(self, hidden: torch.Tensor, inputs: StepInputs, staged: StagedStep) -> torch.Tensor:
        """The hidden states whose logits are used, [S, hidden_size]."""
        if staged.samples_every_row:
            return hidden
        return hidden[inputs.sample_rows[torch.from_numpy(staged.sampled_rows)]]

    def _prompt_logprobs(self, hidden: torch.Tensor, rows: PromptRows) -> tuple[TokenLogprobs, ...]:
        sampling = self.mirror.sampling[rows.slot]
        assert sampling is not None, f"slot {rows.slot} is free"
        first = rows.first_position + 1
        predicted = self.memory.token_ids[rows.slot, first : first + rows.count].tolist()
        entries = []
        for start in range(0, rows.count, PROMPT_LOGPROB_ROWS):
            stop = min(start + PROMPT_LOGPROB_ROWS, rows.count)
            logits = self._model.compute_logits(hidden[rows.first_token + start : rows.first_token + stop]).numpy()
            logits[:, self._vocab_size :] = -np.inf
            for offset, row in enumerate(logits, start):
                logprobs = logprob_row(row, predicted[offset], sampling.prompt_logprobs)
                entries.append(logprobs.entry(first + offset))
        return tuple(entries)


def _pairs(ids: "array[int]") -> list[tuple[int, int]]:
    """Flat pairs as tuples."""
    return list(zip(ids[::2], ids[1::2], strict=True))
