"""Runs step plans on the CPU: takes a `StepPlan`, updates slots and cache, runs the model and samples.

When `execute` returns, the whole step is done. The GPU's runner, which only issues the same work and does not wait for
it, is `cuda/runner.py`. Sockets, and when a plan comes, are the business of `worker.py`.
"""

import itertools
import time
from array import array

import numpy as np
import torch

from common.config import StepLimits
from common.messages import NewSlots, SlotInit, SlotSampling, StepPlan
from kernels.step_layout import PlanLayout, StepInputs
from worker_proc.cpu_threads import StepThreads
from worker_proc.fixed_order_model import GROUP_TOKENS, FixedOrderModel
from worker_proc.forward_context import ForwardContext
from worker_proc.kv_cache import KVCache
from worker_proc.logprobs import logprob_table
from worker_proc.models.llama import LlamaForCausalLM
from worker_proc.pending import Arrived, PendingStep, PromptPiece, prompt_parts
from worker_proc.pooling import Pooler
from worker_proc.sampler import Sampled, Sampler
from worker_proc.slots import SlotMemory, SlotMirror
from worker_proc.spans import span
from worker_proc.step_inputs import PackedStep, PromptRows, StepStager, fill_inputs

_NO_TOKENS = np.empty(0, dtype=np.int32)


class CpuRunner:
    """Runs steps on the CPU: inputs and sampling in NumPy, results at once.

    Args:
        model: in its final form.
        max_model_len: tokens that a slot has room for.
        tokenizer_vocab_size: ids from here on are never sampled.
        deterministic: a request's results must not depend on the others, to the bit; slower.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        limits: StepLimits,
        max_model_len: int,
        tokenizer_vocab_size: int,
        *,
        deterministic: bool = False,
    ) -> None:
        self.memory = SlotMemory(limits.max_num_seqs, max_model_len, cache.block_size, torch.device("cpu"))
        self.mirror = SlotMirror(limits.max_num_seqs)
        self._model = FixedOrderModel(model) if deterministic else model
        self._cache, self._limits = cache, limits
        self._vocab_size = tokenizer_vocab_size
        self._layout = PlanLayout(limits.max_num_seqs, cache.key_caches[0].shape[0])
        self._plan = np.zeros(self._layout.size, dtype=np.int32)
        self._stager = StepStager(self.memory, self.mirror, self._layout, limits.max_num_batched_tokens)
        self._inputs = StepInputs.allocate(limits.max_num_seqs, limits.max_num_batched_tokens, self.memory.device)
        self._sampler = Sampler(self.memory, self.mirror, tokenizer_vocab_size)
        self._threads = StepThreads(model.config, GROUP_TOKENS if deterministic else None)
        self._hidden = torch.empty(0)  # of the last step
        self._pooler = Pooler(lambda first, count: self._hidden[first : first + count], exact=deterministic)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingStep:
        """Carry out a plan, in the order that `StepPlan` gives."""
        start = time.perf_counter_ns()
        with span("input"):
            inputs, packed = self._prepare(plan)
        prepared = time.perf_counter_ns()
        with span("forward"), self._threads.step(packed.token_count):
            logits, pieces = self._compute(inputs, packed)
            embeddings = self._pooler.pool(packed.pooled_rows)
        computed = time.perf_counter_ns()
        with span("sampling"):
            sampled = Sampled(_NO_TOKENS) if logits is None else self._sample(logits, packed, plan)
        marks = (start, prepared, computed, time.perf_counter_ns())
        parts_us = [(end - begin) // 1000 for begin, end in itertools.pairwise(marks)]
        arrived = Arrived(array("i", sampled.token_ids.tobytes()), *parts_us)
        return PendingStep(plan.step_id, lambda: arrived, sampled.logprob_rows, sampled.logprobs, pieces, embeddings)

    @property
    def unprepared_count(self) -> int:
        """No size needs preparation."""
        return 0

    def prepare_next(self) -> bool:
        """A CPU prepares nothing ahead."""
        return False

    def warm_up(self) -> None:
        """Run one prompt and one decode step in slot 0 and block 0, so that the first request finds everything warm."""
        room = min(self._cache.block_size - 1, self.memory.token_capacity - 2, self._limits.max_num_batched_tokens)
        count = max(1, room)
        init = SlotInit(
            slot=0, token_ids=array("i", [0] * count), prompt_count=count, computed_count=0, block_ids=array("i", [0]),
            sampling=SlotSampling(),
        )  # fmt: skip
        chunk = StepPlan(
            step_id=1, new_slots=NewSlots.of(init), chunk_slots=array("H", [0]), chunk_token_counts=array("i", [count]),
            chunk_samples=array("B", [1]), chunk_block_counts=array("i", [0]),
        )  # fmt: skip
        self.execute(chunk).result()
        if self._cache.block_size > count:
            self.execute(StepPlan(step_id=2, decode_slots=array("H", [0]))).result()
        self.mirror.clear(0)

    def _prepare(self, plan: StepPlan) -> tuple[StepInputs, PackedStep]:
        """Make all changes that come before the rows run, and work out the rows' inputs."""
        writes = self._stager.change_slots(plan)
        self._cache.move_blocks(plan)
        for init in plan.new_slots:
            self._sampler.start(init)
        self._pooler.start(plan.new_slots)
        packed = self._stager.pack(plan, self._plan)
        self.memory.apply(*map(torch.from_numpy, writes.arrays()))
        inputs = self._inputs.bucket(packed.row_count, packed.token_count)
        fill_inputs(self._plan, self._layout, self.memory.state, inputs, self._cache.block_size)
        return inputs, packed

    def _compute(self, inputs: StepInputs, packed: PackedStep) -> tuple[torch.Tensor | None, list[PromptPiece]]:
        """The logits that are sampled from, [S, vocab], and the prompt's log probabilities; None if nothing samples."""
        if not packed.token_count:
            return None, []
        hidden = self._model(inputs.token_ids, inputs.positions, self._context(inputs, packed.decode_row_count))
        self._hidden = hidden
        pieces = [piece for rows in packed.prompt_rows for piece in self._prompt_pieces(hidden, rows)]
        if not len(packed.sampled_rows):
            return None, pieces
        return self._model.compute_logits(self._sampled_hidden(hidden, inputs, packed)), pieces

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
            key_scales=self._cache.key_scales,
            value_scales=self._cache.value_scales,
            block_size=self._cache.block_size,
            decode_row_count=decode_row_count,
            prompt_lengths=prompt_lengths,
        )

    def _sampled_hidden(self, hidden: torch.Tensor, inputs: StepInputs, packed: PackedStep) -> torch.Tensor:
        """The hidden states whose logits are used, [S, hidden_size]."""
        if len(packed.sampled_rows) == packed.token_count:  # every row is one token, and samples
            return hidden[: packed.token_count]
        return hidden[inputs.sample_rows[torch.as_tensor(packed.sampled_rows)]]

    def _prompt_pieces(self, hidden: torch.Tensor, rows: PromptRows) -> list[PromptPiece]:
        """Log probabilities of the prompt tokens that a chunk's tokens predict; a few rows of logits at a time."""
        sampling = self.mirror.sampling[rows.slot]
        assert sampling is not None, f"slot {rows.slot} is free"
        pieces = []
        for token, count, position in prompt_parts(rows):
            logits = self._model.compute_logits(hidden[token : token + count]).numpy()
            logits[:, self._vocab_size :] = -np.inf
            predicted = self.memory.token_ids[rows.slot, position : position + count].numpy()
            table = logprob_table(logits, predicted, sampling.prompt_logprobs)
            pieces.append(PromptPiece(rows.slot, position, sampling.prompt_logprobs, table))
        return pieces

    def _sample(self, logits: torch.Tensor, packed: PackedStep, plan: StepPlan) -> Sampled:
        """Sample from logits [S, vocab] and feed the slots."""
        masks = dict(zip(plan.mask_slots, plan.masks, strict=True))
        slots, positions = np.asarray(packed.sampled_slots), np.asarray(packed.sampled_positions)
        return self._sampler.sample(logits.numpy(), slots, positions, masks)
