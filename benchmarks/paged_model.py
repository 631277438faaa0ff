"""Runs a model over a paged cache of any element type, row by row, for the quality benchmark.

It uses the worker's own forward pass, store and attention, but neither scheduler nor sampling. On a GPU the attention
kernels run.
"""

import torch

from worker_proc.forward_context import ForwardContext
from worker_proc.kv_cache import KVCache, cache_specs
from worker_proc.models.llama import LlamaForCausalLM

BLOCK_SIZE = 16
LOGIT_ROWS = 256
"""Rows whose logits are held at once."""


class PagedModel:
    """Sequences side by side over one cache.

    Args:
        kv_cache_dtype: as the option of that name.
        row_count, max_tokens: sequences, and the most tokens that each may get.

    Attributes:
        lengths: tokens of each row that are in the cache; lower one to go back.
    """

    def __init__(self, model: LlamaForCausalLM, kv_cache_dtype: str, row_count: int, max_tokens: int) -> None:
        weight = model.model.norm.weight
        self.model, self.device = model, weight.device
        width = -(-max_tokens // BLOCK_SIZE)
        specs = cache_specs(model.config, weight.dtype, kv_cache_dtype)
        self.cache = KVCache(
            specs, block_size=BLOCK_SIZE, block_count=row_count * width, host_block_count=0, device=self.device
        )
        self.block_tables = torch.arange(row_count * width, dtype=torch.int32).view(row_count, width)
        self.lengths = [0] * row_count

    def context(self, counts: list[int]) -> tuple[ForwardContext, torch.Tensor]:
        """The context of a step in which each row computes that many tokens, and their positions; advances lengths."""
        starts, slots, positions = [0], [], []
        for row, count in enumerate(counts):
            position = torch.arange(self.lengths[row], self.lengths[row] + count)
            slots.append(self.block_tables[row, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE)
            positions.append(position)
            starts.append(starts[-1] + count)
            self.lengths[row] += count

        def integers(values: list[int] | torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(self.device)

        decode_rows = len(counts) if max(counts) == 1 else 0
        context = ForwardContext(
            slot_mapping=torch.cat(slots).to(self.device), row_slots=integers(list(range(len(counts)))),
            query_starts=integers(starts), context_lengths=integers(self.lengths),
            block_tables=integers(self.block_tables), key_caches=self.cache.key_caches,
            value_caches=self.cache.value_caches, key_scales=self.cache.key_scales,
            value_scales=self.cache.value_scales, block_size=BLOCK_SIZE, decode_row_count=decode_rows,
            device_decode_row_count=integers([decode_rows]) if self.device.type == "cuda" else None,
        )  # fmt: skip
        return context, integers(torch.cat(positions))

    def step(self, tokens: list[list[int]]) -> torch.Tensor:
        """Compute the next tokens of every row -> hidden states [all tokens, hidden_size]."""
        context, positions = self.context([len(row) for row in tokens])
        ids = torch.tensor([token for row in tokens for token in row], dtype=torch.int32)
        return self.model(ids.to(self.device), positions, context)

    def log_likelihoods(self, hidden: torch.Tensor, targets: list[int]) -> torch.Tensor:
        """Log probability of each target after each hidden state [n, hidden_size] -> float32 [n], on the CPU."""
        wanted = torch.tensor(targets, device=self.device)
        parts = []
        for start in range(0, len(targets), LOGIT_ROWS):
            logits = self.model.compute_logits(hidden[start : start + LOGIT_ROWS])
            chosen = logits.gather(1, wanted[start : start + LOGIT_ROWS, None]).squeeze(1)
            parts.append(chosen - logits.logsumexp(-1))
        return torch.cat(parts).cpu()

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The likeliest `count` tokens after each prompt; one prompt a row, all rows side by side."""
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        hidden = self.step(prompts)[ends.to(self.device)]
        outputs: list[list[int]] = [[] for _ in prompts]
        for index in range(count):
            chosen = self.model.compute_logits(hidden).argmax(-1).tolist()
            for output, token in zip(outputs, chosen, strict=True):
                output.append(token)
            if index + 1 < count:
                hidden = self.step([[token] for token in chosen])
        return outputs
