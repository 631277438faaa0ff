"""Runs steps on a GPU: one copy in, everything else issued without waiting, one copy out.

The thread that calls `execute` never waits for the device and reads nothing from it; the result's copies are waited for
by whoever calls `PendingStep.result`. What a step reads and writes lies at fixed addresses: the packed plan, the slots'
memory, the step's inputs, the sampled tokens.
"""

import torch

from common.config import StepLimits
from common.messages import SlotInit
from kernels.step_inputs import step_inputs
from kernels.step_layout import StepInputs
from worker_proc.kernel_sampler import KernelSampler, sampling_tables
from worker_proc.kv_cache import KVCache
from worker_proc.logprobs import LogprobTable, logprob_tensors
from worker_proc.models.llama import LlamaForCausalLM
from worker_proc.pending import PromptPiece, Sampled
from worker_proc.runner import Runner
from worker_proc.slots import SlotMemory, SlotMirror, StateWrites
from worker_proc.step_inputs import StagedStep
from worker_proc.transfer import to_device, to_host


class CudaRunner(Runner):
    """Runs steps on a GPU (or, under Triton's interpreter, slowly on the CPU for tests).

    Args:
        tokenizer_vocab_size: ids from here on are never sampled.
        device: where model and cache are.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        cache: KVCache,
        limits: StepLimits,
        *,
        max_model_len: int,
        tokenizer_vocab_size: int,
        device: torch.device,
    ) -> None:
        memory = SlotMemory(
            limits.max_num_seqs, max_model_len, cache.block_size, device, sampling_tables(tokenizer_vocab_size)
        )
        super().__init__(model, cache, limits, memory, SlotMirror.empty(limits.max_num_seqs))
        self._vocab_size = tokenizer_vocab_size
        self._sampler = KernelSampler(memory, tokenizer_vocab_size, model.config.vocab_size)
        plan_size = 16 + 8 * limits.max_num_seqs + memory.block_capacity * limits.max_num_seqs
        self._plan = torch.zeros(plan_size, dtype=torch.int32, device=device)

    def _start_slot(self, init: SlotInit, writes: StateWrites) -> None:
        self._sampler.start(init, writes)

    def _fill(self, staged: StagedStep) -> StepInputs:
        packed = to_device(staged.buffer, self.memory.device)
        plan = self._plan[: staged.sampled_rows_part.stop]
        plan.copy_(packed[: staged.sampled_rows_part.stop])
        if staged.write_count:
            self.memory.apply(*(packed[part] for part in staged.write_parts))
            self._sampler.count_tokens()
        inputs = self._inputs.bucket(staged.row_count, staged.token_count)
        step_inputs(plan, staged.layout, self.memory.state, inputs, self._cache.block_size)
        return inputs

    def _sampled_rows(self, staged: StagedStep) -> torch.Tensor:
        return self._plan[staged.sampled_rows_part]

    def _sample(self, logits: torch.Tensor, inputs: StepInputs, staged: StagedStep) -> Sampled:
        rows = slice(staged.row_count) if staged.samples_every_row else self._sampled_rows(staged)
        row_slots, sample_rows = inputs.row_slots[rows], inputs.sample_rows[rows]
        self._sampler.ban_long_words(logits, staged.sampled_slots, staged.sampled_positions)
        out = self._sampler.sample(logits, row_slots, sample_rows)
        token_ids = to_host(out.ids)
        wanted = self._wanted_logprobs(staged)
        table = None
        if wanted:
            table = LogprobTable(*(to_host(part) for part in (out.logprobs, out.ranks, out.top_ids, out.top_logprobs)))
        return Sampled(token_ids, wanted, table)

    def _wanted_logprobs(self, staged: StagedStep) -> list[tuple[int, int, int]]:
        wanted = []
        for index, slot in enumerate(staged.sampled_slots.tolist()):
            sampling = self.mirror.sampling[slot]
            if sampling is not None and sampling.logprobs >= 0:
                wanted.append((index, index, sampling.logprobs))
        return wanted

    def _prompt_piece(
        self, logits: torch.Tensor, token_ids: torch.Tensor, slot: int, first_position: int, top_count: int
    ) -> PromptPiece:
        tensors = logprob_tensors(logits[:, : self._vocab_size], token_ids, top_count)
        return PromptPiece(slot, first_position, top_count, LogprobTable(*(to_host(tensor) for tensor in tensors)))

    def _done(self) -> torch.cuda.Event | None:
        if self.memory.device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event
