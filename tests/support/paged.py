"""Runs sequences through a model over a hostile paged cache: shuffled blocks, NaN in everything not yet written."""

from dataclasses import dataclass, field
from random import Random

import torch

from worker_proc.forward_context import ForwardContext
from worker_proc.models.llama import LlamaForCausalLM


@dataclass
class PagedSequences:
    """Runs token sequences through a model with a paged cache whose blocks are shuffled and whose free slots hold NaN.

    One row of the block tables per sequence; row i uses slot i. The position counts of a row only grow.
    """

    model: LlamaForCausalLM
    sequence_count: int
    block_size: int = 4
    max_blocks: int = 24
    prompt_lengths: list[int] | None = None
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        block_count = self.sequence_count * self.max_blocks
        order = list(range(block_count))
        Random(7).shuffle(order)
        self.block_tables = torch.tensor(order, dtype=torch.int32).view(self.sequence_count, self.max_blocks)
        shape = (block_count, config.kv_head_count, self.block_size, config.head_dim)
        dtype = self.model.model.norm.weight.dtype
        self.key_caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(config.layer_count)]
        self.value_caches = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(config.layer_count)]
        self.lengths = [0] * self.sequence_count

    def context(self, counts: dict[int, int], padding_tokens: int = 0) -> ForwardContext:
        """The context of a step in which row `slot` computes `counts[slot]` more tokens; advances the lengths."""
        starts, slot_mapping, context_lengths = [0], [], []
        for slot, count in counts.items():
            positions = torch.arange(self.lengths[slot], self.lengths[slot] + count)
            blocks = self.block_tables[slot, positions // self.block_size].long()
            slot_mapping.append(blocks * self.block_size + positions % self.block_size)
            self.lengths[slot] += count
            context_lengths.append(self.lengths[slot])
            starts.append(starts[-1] + count)
        slots = list(counts)
        if padding_tokens:
            slot_mapping.append(torch.full((padding_tokens,), -1))
            slots.append(-1)
            context_lengths.append(0)
            starts.append(starts[-1] + padding_tokens)
        prompts = (
            None if self.prompt_lengths is None else [self.prompt_lengths[slot] if slot >= 0 else 0 for slot in slots]
        )
        return ForwardContext(
            slot_mapping=torch.cat(slot_mapping),
            row_slots=torch.tensor(slots, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lengths=torch.tensor(context_lengths, dtype=torch.int32),
            block_tables=self.block_tables,
            key_caches=self.key_caches,
            value_caches=self.value_caches,
            block_size=self.block_size,
            decode_row_count=sum(count == 1 for count in counts.values()),
            prompt_lengths=None if prompts is None else torch.tensor(prompts, dtype=torch.int32),
        )

    def step(self, tokens: dict[int, list[int]], padding_tokens: int = 0) -> dict[int, torch.Tensor]:
        """Compute the next tokens of some rows in one forward pass -> per row its logits [tokens, vocab]."""
        starts = {slot: self.lengths[slot] for slot in tokens}
        context = self.context({slot: len(ids) for slot, ids in tokens.items()}, padding_tokens)
        ids = [token for row in tokens.values() for token in row] + [0] * padding_tokens
        positions = [starts[slot] + i for slot, row in tokens.items() for i in range(len(row))] + [0] * padding_tokens
        with torch.inference_mode():
            token_ids = torch.tensor(ids, dtype=torch.int32)
            hidden = self.model(token_ids, torch.tensor(positions, dtype=torch.int32), context)
            logits = self.model.compute_logits(hidden)
        real_count = len(ids) - padding_tokens
        return dict(zip(tokens, logits[:real_count].split([len(row) for row in tokens.values()]), strict=True))

    def run_in_chunks(self, slot: int, ids: list[int], chunk: int) -> torch.Tensor:
        """Logits [len(ids), vocab] of one row computed `chunk` tokens at a time."""
        return torch.cat([self.step({slot: ids[i : i + chunk]})[slot] for i in range(0, len(ids), chunk)])
