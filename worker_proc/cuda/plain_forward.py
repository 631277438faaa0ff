"""The plain torch modules behind the interface of the fused pass: for models that the fused pass does not cover.

Slower, since it launches every operation by itself, allocates, and cannot be captured. `covered_models` says what the
fused pass does not cover. Called by the GPU runner.
"""

import torch

from kernels.step_layout import StepInputs
from worker_proc.cuda.buckets import Bucket
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.forward_context import ForwardContext
from worker_proc.kv_cache import KVCache
from worker_proc.models.llama import LlamaForCausalLM


class PlainForward:
    """The model's own forward pass."""

    capturable = False
    fixed_order = False

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self._hidden = torch.empty(0)

    def run(
        self, bucket: Bucket, inputs: StepInputs, cache: KVCache, slots: DeviceSlots, counts: torch.Tensor
    ) -> torch.Tensor:
        """See `StepProgram`'s `Forward`. A row that does not sample gets the logits of some token."""
        prompt_lengths = None
        if self._model.rotary.length_dependent:
            prompt_lengths = slots.prompt_lengths[inputs.row_slots.long()]
        context = ForwardContext(
            slot_mapping=inputs.slot_mapping,
            row_slots=inputs.row_slots,
            query_starts=inputs.query_starts,
            context_lengths=inputs.context_lengths,
            block_tables=slots.block_tables,
            key_caches=cache.key_caches,
            value_caches=cache.value_caches,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            block_size=cache.block_size,
            decode_row_count=0,
            prompt_lengths=prompt_lengths,
            device_decode_row_count=counts[1:2],
        )
        self._hidden = self._model(inputs.token_ids, inputs.positions, context)
        return self._model.compute_logits(self._hidden[inputs.sample_rows.clamp(min=0).long()])

    def shortened(self) -> "PlainForward":
        """All of it: the modules have no other way to run."""
        return self

    def token_logits(self, first_token: int, count: int) -> torch.Tensor:
        """Logits of any tokens of the last pass."""
        return self._model.compute_logits(self.token_hidden(first_token, count))

    def token_hidden(self, first_token: int, count: int) -> torch.Tensor:
        """Hidden states of any tokens of the last pass, after the last norm."""
        return self._hidden[first_token : first_token + count]
