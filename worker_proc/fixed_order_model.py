"""`--deterministic` on the CPU: a model that gives a token the same bits whatever else is in the step.

Torch and the libraries below it choose kernels, and with them the order of sums, by the shapes in a step. So here every
step is computed in groups of GROUP_TOKENS tokens, the last one padded: each operation always has the same shape, and a
row of a product does not depend on the other rows. Attention, whose number of keys varies, is `fixed_order_attention`.
The price: padding is computed too, and the weights are read once per group.

Takes the place of the model in the CPU's runner.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from worker_proc.forward_context import ForwardContext
from worker_proc.model_config import ModelConfig
from worker_proc.models.llama import LlamaForCausalLM

GROUP_TOKENS = 16
"""Tokens that are computed at a time, whatever a step holds."""

SHARED_ELEMENTS = 32_768
"""Elementwise operations give each thread at least so many elements (at::internal::GRAIN_SIZE)."""


class FixedOrderModel:
    """A loaded model, computed in groups; called as the model itself."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model
        self.config, self.rotary = model.config, model.rotary

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See `LlamaForCausalLM.forward`."""
        groups = []
        for start in range(0, len(token_ids), GROUP_TOKENS):
            count = min(GROUP_TOKENS, len(token_ids) - start)
            ids, places = (_padded(tensor[start : start + count], 0) for tensor in (token_ids, positions))
            groups.append(self._model(ids, places, group_context(context, start, count))[:count])
        return torch.cat(groups)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `LlamaForCausalLM.compute_logits`."""
        return torch.cat([self._model.compute_logits(_padded(part, 0))[: len(part)] for part in _parts(hidden)])


def group_context(context: ForwardContext, start: int, count: int) -> ForwardContext:
    """Of `count` tokens from `start`: the rows that they belong to, cut at both ends, and a row for the padding."""
    starts, lengths = context.query_starts.tolist(), context.context_lengths.tolist()
    end = start + count
    rows = [row for row in range(context.row_count) if starts[row] < end and starts[row + 1] > start]
    ends = [min(starts[row + 1], end) - start for row in rows]
    prompt_lengths = None if context.prompt_lengths is None else _with_padding(context.prompt_lengths[rows])
    return replace(
        context,
        slot_mapping=_padded(context.slot_mapping[start:end], -1),
        row_slots=_with_padding(context.row_slots[rows], -1),
        query_starts=torch.tensor([0, *ends, GROUP_TOKENS], dtype=torch.int32),
        context_lengths=torch.tensor(
            [lengths[row] - max(0, starts[row + 1] - end) for row in rows] + [0], dtype=torch.int32
        ),
        prompt_lengths=prompt_lengths,
        decode_row_count=0,
        fixed_order=True,
        plans={},
    )


def aligned_threads(config: ModelConfig, most: int) -> int:
    """The most threads, at most `most`, between which elementwise work on a group is shared in whole rows.

    The last elements of a thread's share are computed without vector instructions, which can round differently: a row's
    share must not end within a row.
    """
    widths = (config.hidden_size, config.intermediate_size, config.head_count * config.head_dim)
    shares = [-(-GROUP_TOKENS * width // SHARED_ELEMENTS) for width in widths]
    return max(n for n in range(1, most + 1) if all(GROUP_TOKENS % min(n, share) == 0 for share in shares))


def _parts(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from rows.split(GROUP_TOKENS)


def _padded(rows: torch.Tensor, value: int) -> torch.Tensor:
    """The rows in memory of their own, followed by as many of `value` as a group lacks."""
    group = rows.new_full((GROUP_TOKENS, *rows.shape[1:]), value)
    group[: len(rows)] = rows
    return group


def _with_padding(rows: torch.Tensor, value: int = 0) -> torch.Tensor:
    return torch.cat((rows, rows.new_full((1,), value)))
