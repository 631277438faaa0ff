"""The worker's state of every slot: what is in device memory, and the host's copy of its lengths (the mirror).

A slot is the place of one running request. Everything that a step reads of it is in one flat int32 tensor, divided into
tables. So all that a step plan changes (tokens and parameters of new slots, appended blocks) is one list of addresses
and values, copied once and scattered once. Sampled ids are written by the device and are never read back here: the host
knows lengths, because the plan says how they grow, but not values.

Row `slot_count` of every table is scratch: index -1, which stands for padding, wraps around to it.
"""

from array import array
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from common.errors import ConfigError
from common.messages import SlotInit, SlotSampling
from kernels.step_layout import SlotState

ALIGNMENT = 64
"""Elements that tables start at a multiple of, so that kernels may read them in wide words."""

TOKEN_MARGIN = 8
"""Token places beyond max_model_len, for what run-ahead writes after a request's end."""

_LENGTHS = ("known_lengths", "computed_lengths", "prompt_lengths")

IntArray = np.ndarray

Words = array | np.ndarray
"""Elements of four bytes, in one piece, whose bits are meant."""


def div_ceil(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


class SlotMemory:
    """Device memory of all slots.

    Args:
        tables: further int32 tables by name, with their columns; for whoever samples.

    Attributes:
        memory: int32 [n], everything; the others are views into it.
        places: name -> where the table starts in it, and the table's columns.
        token_ids: int32 [slots + 1, token_capacity]; the first known_lengths are the request's tokens.
        block_tables: int32 [slots + 1, block_capacity].
        known_lengths, computed_lengths, prompt_lengths: int32 [slots + 1].
        tables: name -> int32 [slots + 1, columns].
        state: what every step's input preparation reads.

    Raises:
        ConfigError: more state than 32-bit addresses reach.
    """

    def __init__(
        self,
        slot_count: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        tables: Mapping[str, int] | None = None,
    ) -> None:
        self.slot_count, self.block_size, self.device = slot_count, block_size, device
        self.block_capacity = div_ceil(max_model_len + TOKEN_MARGIN, block_size)
        self.token_capacity = self.block_capacity * block_size
        widths = {"token_ids": self.token_capacity, "block_tables": self.block_capacity}
        widths |= dict.fromkeys(_LENGTHS, 1) | dict(tables or {})
        self.places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, columns in widths.items():
            self.places[name] = end, columns
            end += div_ceil((slot_count + 1) * columns, ALIGNMENT) * ALIGNMENT
        if end > 2**31 - 1:
            raise ConfigError(
                f"--max-num-seqs {slot_count} with {max_model_len} tokens each needs {4 * end} bytes of slot state; "
                f"at most {2**33} are supported"
            )
        self.memory = torch.zeros(end, dtype=torch.int32, device=device)
        self.token_ids, self.block_tables = self._table("token_ids"), self._table("block_tables")
        self.known_lengths, self.computed_lengths, self.prompt_lengths = (self._table(name)[:, 0] for name in _LENGTHS)
        self.tables = {name: self._table(name) for name in tables or ()}
        self.state = SlotState(self.token_ids, self.known_lengths, self.computed_lengths, self.block_tables)

    def _table(self, name: str) -> torch.Tensor:
        start, columns = self.places[name]
        return self.memory[start : start + (self.slot_count + 1) * columns].view(self.slot_count + 1, -1)

    def apply(self, addresses: torch.Tensor, values: torch.Tensor) -> None:
        """Carry out writes that were collected in a `StateWrites`; both int32 [n] on this device."""
        self.memory.index_copy_(0, addresses.long(), values)


class StateWrites:
    """The host's writes to a `SlotMemory` before a step: int32 values and the addresses they go to.

    Attributes:
        count: values so far.
    """

    def __init__(self, memory: SlotMemory) -> None:
        self.count = 0
        self._places = memory.places
        self._firsts, self._counts = array("i"), array("i")
        self._values: list[Words] = []

    def add(self, table: str, slot: int, values: Words) -> None:
        """Write values to the start of the slot's row of a table."""
        start, columns = self._places[table]
        count = len(values)
        assert count <= columns, f"{count} values for a row of {table}"
        self.count += count
        self._firsts.append(start + slot * columns)
        self._counts.append(count)
        self._values.append(values)

    def add_slot(self, init: SlotInit) -> None:
        """Write what every new slot starts with."""
        slot = init.slot
        self.add("token_ids", slot, init.token_ids)
        self.add("block_tables", slot, init.block_ids)
        self.add("known_lengths", slot, array("i", (len(init.token_ids),)))
        self.add("computed_lengths", slot, array("i", (init.computed_count,)))
        self.add("prompt_lengths", slot, array("i", (init.prompt_count,)))

    def arrays(self) -> tuple[IntArray, IntArray]:
        """Addresses and values, int32 [count] each."""
        if not self.count:
            return _NOTHING, _NOTHING
        firsts, counts = np.frombuffer(self._firsts, np.int32), np.frombuffer(self._counts, np.int32)
        before = counts.cumsum(dtype=np.int32) - counts
        addresses = np.arange(self.count, dtype=np.int32)
        addresses += np.repeat(firsts - before, counts)
        return addresses, np.frombuffer(bytearray().join(self._values), dtype=np.int32)


_NOTHING = np.empty(0, dtype=np.int32)


class SlotMirror:
    """What the host knows of the slots without reading the device.

    Attributes:
        table: int32 [4, slots]; the following are its rows, int32 [slots] each.
        known_lengths, computed_lengths, prompt_lengths: as on the device, once all issued steps have run.
        block_counts: blocks in each slot's table.
        sampling: of each slot in use; None marks a free slot.
    """

    def __init__(self, slot_count: int) -> None:
        self.table = np.zeros((4, slot_count), dtype=np.int32)
        self.known_lengths, self.computed_lengths, self.prompt_lengths, self.block_counts = self.table
        self.sampling: list[SlotSampling | None] = [None] * slot_count

    def clear(self, slot: int) -> None:
        """Free the slot: its request is gone."""
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


def known_ids(sampling: SlotSampling, vocab_size: int) -> SlotSampling:
    """A slot's parameters without end ids and bad words outside the vocabulary, which are never sampled anyway."""
    ends, words = sampling.end_token_ids, sampling.bad_token_ids
    if max(ends, default=0) < vocab_size and (not words or all(max(word, default=0) < vocab_size for word in words)):
        return sampling
    return replace(
        sampling,
        end_token_ids=tuple(token_id for token_id in ends if token_id < vocab_size),
        bad_token_ids=tuple(word for word in words if max(word, default=0) < vocab_size),
    )
