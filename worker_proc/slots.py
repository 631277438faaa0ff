"""The worker's state of every slot: what the device holds, and the host's mirror of its lengths.

A slot is the place of one running request. Everything that a step reads of it lies in one flat int32 tensor, carved
into tables, so that whatever a step plan changes (tokens and parameters of new slots, appended blocks) is one list of
addresses and values, copied once and scattered once. Sampled ids are written by the device and never come back through
here: the host knows lengths, because the plan says how they grow, but never values.

Row `slot_count` of every table is scratch: index -1, which stands for padding, wraps to it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.errors import ConfigError
from common.messages import SlotInit, SlotSampling
from kernels.step_layout import SlotState

ALIGNMENT = 64
"""Elements that tables start at a multiple of, so that kernels may read them in wide words."""

TOKEN_MARGIN = 8
"""Token places beyond max_model_len, for what run-ahead writes after a request's end."""

PARAMETERS = (
    "known_lengths", "computed_lengths", "prompt_lengths", "min_output_counts", "top_k", "temperature", "top_p",
    "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_FLOATS = frozenset(PARAMETERS[5:])

IntArray = np.ndarray


def div_ceil(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


class SlotMemory:
    """Device memory of all slots.

    Attributes:
        memory: int32 [n], everything; the others are views into it.
        token_ids: int32 [slots + 1, token_capacity]; the first known_lengths are the request's tokens.
        block_tables: int32 [slots + 1, block_capacity].
        known_lengths, computed_lengths, prompt_lengths: int32 [slots + 1].
        temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty: float32 [slots + 1].
        top_k, min_output_counts: int32 [slots + 1].
        seeds: int64 [slots + 1], the bits of a uint64.
        state: the tables that every step's input preparation reads.

    Raises:
        ConfigError: more state than 32-bit addresses reach.
    """

    known_lengths: torch.Tensor
    computed_lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    min_output_counts: torch.Tensor
    top_k: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    repetition_penalty: torch.Tensor

    def __init__(self, slot_count: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.slot_count, self.block_size, self.device = slot_count, block_size, device
        self.block_capacity = div_ceil(max_model_len + TOKEN_MARGIN, block_size)
        self.token_capacity = self.block_capacity * block_size
        self.offsets: dict[str, int] = {}
        rows, end = slot_count + 1, 0
        sizes = {"token_ids": rows * self.token_capacity, "block_tables": rows * self.block_capacity, "seeds": 2 * rows}
        for name, size in (sizes | dict.fromkeys(PARAMETERS, rows)).items():
            self.offsets[name] = end
            end += div_ceil(size, ALIGNMENT) * ALIGNMENT
        if end > 2**31 - 1:
            raise ConfigError(
                f"--max-num-seqs {slot_count} with {max_model_len} tokens each needs {4 * end} bytes of slot state; "
                f"at most {2**33} are supported"
            )
        self.memory = torch.zeros(end, dtype=torch.int32, device=device)
        self.token_ids = self._view("token_ids", sizes["token_ids"]).view(rows, -1)
        self.block_tables = self._view("block_tables", sizes["block_tables"]).view(rows, -1)
        self.seeds = self._view("seeds", 2 * rows).view(torch.int64)
        for name in PARAMETERS:
            view = self._view(name, rows)
            setattr(self, name, view.view(torch.float32) if name in _FLOATS else view)
        self.state = SlotState(self.token_ids, self.known_lengths, self.computed_lengths, self.block_tables)

    def _view(self, name: str, size: int) -> torch.Tensor:
        return self.memory[self.offsets[name] : self.offsets[name] + size]

    def apply(self, addresses: torch.Tensor, values: torch.Tensor) -> None:
        """Carry out writes that were collected in a `StateWrites`; both int32 [n] on this device."""
        if addresses.shape[0]:
            self.memory.index_copy_(0, addresses.long(), values)

    def bytes_used(self) -> int:
        """Bytes of device memory."""
        return self.memory.numel() * 4


class StateWrites:
    """What the host changes in a `SlotMemory` before a step: int32 values with the addresses they go to."""

    def __init__(self, memory: SlotMemory) -> None:
        self._memory = memory
        self._addresses: list[IntArray] = []
        self._values: list[IntArray] = []

    def add_range(self, table: str, start: int, values: IntArray) -> None:
        """Put consecutive values into a table, seen flat, from `start` on."""
        first = self._memory.offsets[table] + start
        self.add(np.arange(first, first + len(values), dtype=np.int32), values)

    def add(self, addresses: IntArray, values: IntArray) -> None:
        """Put values at any addresses."""
        self._addresses.append(addresses)
        self._values.append(values)

    def add_slot(self, init: SlotInit) -> None:
        """Everything that a new slot starts with."""
        memory, slot = self._memory, init.slot
        self.add_range("token_ids", slot * memory.token_capacity, as_int32(init.token_ids))
        self.add_range("block_tables", slot * memory.block_capacity, as_int32(init.block_ids))
        seed = np.array([init.sampling.seed], dtype=np.uint64).view(np.int32)
        self.add_range("seeds", 2 * slot, seed)
        addresses = np.array([memory.offsets[name] + slot for name in PARAMETERS], dtype=np.int32)
        self.add(addresses, _parameter_bits(init))

    def arrays(self) -> tuple[IntArray, IntArray]:
        """Addresses and values, int32 [n] each."""
        if not self._addresses:
            return _NOTHING, _NOTHING
        return np.concatenate(self._addresses), np.concatenate(self._values)


_NOTHING = np.empty(0, dtype=np.int32)


def _parameter_bits(init: SlotInit) -> IntArray:
    sampling = init.sampling
    known, computed = len(init.token_ids), init.computed_count
    counts = (known, computed, init.prompt_count, sampling.min_output_count, sampling.top_k)
    numbers = [getattr(sampling, name) for name in PARAMETERS[len(counts) :]]
    return np.concatenate((np.array(counts, dtype=np.int32), np.array(numbers, dtype=np.float32).view(np.int32)))


def as_int32(numbers: Any) -> IntArray:
    """A number array of a message as int32, without a copy where it is one."""
    return np.asarray(numbers, dtype=np.int32)


@dataclass
class SlotMirror:
    """What the host knows of the slots without reading the device: int32 [slots] each.

    Attributes:
        known_lengths, computed_lengths, prompt_lengths: as on the device, once all issued steps have run.
        block_counts: blocks in each slot's table.
        sampling: of each slot in use; None marks a free slot.
    """

    known_lengths: IntArray
    computed_lengths: IntArray
    prompt_lengths: IntArray
    block_counts: IntArray
    sampling: list[SlotSampling | None]

    @classmethod
    def empty(cls, slot_count: int) -> "SlotMirror":
        """All slots free."""
        lengths = [np.zeros(slot_count, dtype=np.int32) for _ in range(4)]
        return cls(*lengths, sampling=[None] * slot_count)

    def clear(self, slot: int) -> None:
        """The slot's request is gone."""
        assert self.sampling[slot] is not None, f"slot {slot} is cleared, but it is free"
        self.sampling[slot] = None
        self.known_lengths[slot] = self.computed_lengths[slot] = self.block_counts[slot] = 0

    def start(self, init: SlotInit) -> None:
        """The slot gets a request."""
        assert init.slot < len(self.sampling), f"slot {init.slot} of {len(self.sampling)}"
        assert self.sampling[init.slot] is None, f"slot {init.slot} gets a request, but it is not free"
        self.sampling[init.slot] = init.sampling
        self.known_lengths[init.slot] = len(init.token_ids)
        self.computed_lengths[init.slot] = init.computed_count
        self.prompt_lengths[init.slot] = init.prompt_count
        self.block_counts[init.slot] = len(init.block_ids)
