"""The worker's state of every slot: what is in device memory, and the host's copy of its lengths (the mirror).

A slot is the place of one running request. Everything that a step reads of it is in one flat int32 tensor, divided into
tables. So all that a step plan changes (tokens and parameters of new slots, appended blocks) is one list of addresses
and values, copied once and scattered once. Sampled ids are written by the device and are never read back here: the host
knows lengths, because the plan says how they grow, but not values.

Row `slot_count` of every table is scratch: index -1, which stands for padding, wraps around to it.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from common.errors import ConfigError
from common.messages import HEAD, NO_SLOTS, NewSlots, SlotSampling
from kernels.step_layout import SlotState

ALIGNMENT = 64
"""Elements that tables start at a multiple of, so that kernels may read them in wide words."""

TOKEN_MARGIN = 8
"""Token places beyond max_model_len, for what run-ahead writes after a request's end."""

LENGTHS = ("known_lengths", "computed_lengths", "prompt_lengths")
"""In the order in which they stand in a `HEAD`."""

IntArray = np.ndarray

Words = array | np.ndarray
"""Elements of four bytes, in one piece, whose bits are meant."""

NO_RECORDS = array("i")

FEW_SLOTS, KNOWN_TOKENS, KNOWN_BLOCKS = 24, 1024, 64
"""New slots whose addresses are copied one by one, from those that are kept of so many tokens and blocks of each: while
caches are cold, that costs less than working them out with NumPy."""


def div_ceil(count: int, size: int) -> int:
    """How many pieces of `size` hold `count`."""
    return -(-count // size)


class KeptAddresses:
    """Addresses of the same words of each slot.

    Args:
        table: int32 [slots, count].
    """

    def __init__(self, table: IntArray) -> None:
        self.table, self.count = table, table.shape[1]
        self._bytes = memoryview(table).cast("B")

    def of(self, slot: int, count: int | None = None) -> memoryview:
        """The bytes of a slot's first `count` addresses, or of all."""
        start = 4 * slot * self.count
        return self._bytes[start : start + 4 * (self.count if count is None else count)]


class SlotMemory:
    """Device memory of all slots.

    Args:
        tables: further int32 tables by name, with their columns; for whoever samples.
        recorded: those of them that are written whole when a slot starts.

    Attributes:
        memory: int32 [n], everything; the others are views into it.
        places: name -> where the table starts in it, and the table's columns.
        token_ids: int32 [slots + 1, token_capacity]; the first known_lengths are the request's tokens.
        block_tables: int32 [slots + 1, block_capacity].
        known_lengths, computed_lengths, prompt_lengths: int32 [slots + 1].
        tables: name -> int32 [slots + 1, columns].
        state: what every step's input preparation reads.
        records: where each slot's record goes: its lengths and its rows of `recorded` tables.
        id_places: `places` of a new slot's blocks and tokens; kept_blocks, kept_tokens: addresses of the first ones.

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
        recorded: Sequence[str] = (),
    ) -> None:
        self.slot_count, self.block_size, self.device = slot_count, block_size, device
        self.block_capacity = div_ceil(max_model_len + TOKEN_MARGIN, block_size)
        self.token_capacity = self.block_capacity * block_size
        widths = {"token_ids": self.token_capacity, "block_tables": self.block_capacity}
        widths |= dict.fromkeys(LENGTHS, 1) | dict(tables or {})
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
        self.records = KeptAddresses(np.concatenate([self._addresses(name) for name in (*LENGTHS, *recorded)], axis=1))
        self.kept_blocks = KeptAddresses(self._addresses("block_tables", KNOWN_BLOCKS))
        self.kept_tokens = KeptAddresses(self._addresses("token_ids", KNOWN_TOKENS))
        self.id_places = self.places["block_tables"], self.places["token_ids"]
        self.memory = torch.zeros(end, dtype=torch.int32, device=device)
        self.token_ids, self.block_tables = self._table("token_ids"), self._table("block_tables")
        self.known_lengths, self.computed_lengths, self.prompt_lengths = (self._table(name)[:, 0] for name in LENGTHS)
        self.tables = {name: self._table(name) for name in tables or ()}
        self.state = SlotState(self.token_ids, self.known_lengths, self.computed_lengths, self.block_tables)

    def _table(self, name: str) -> torch.Tensor:
        start, columns = self.places[name]
        return self.memory[start : start + (self.slot_count + 1) * columns].view(self.slot_count + 1, -1)

    def _addresses(self, name: str, most: int | None = None) -> IntArray:
        """Of a table's rows, int32 [slots, columns], or of their first `most` columns."""
        start, columns = self.places[name]
        firsts = np.arange(start, start + self.slot_count * columns, columns, dtype=np.int32)
        return firsts[:, None] + np.arange(columns, dtype=np.int32)[:most]

    def keeps_addresses(self, block_count: int, token_count: int) -> bool:
        """Whether the addresses of so many of a slot's blocks and tokens are kept."""
        return block_count <= self.kept_blocks.count and token_count <= self.kept_tokens.count

    def writes_of(self, new: NewSlots) -> "StateWrites":
        """Write what new slots start with: tokens, blocks and records."""
        return StateWrites(self, new, heads_of(new)[:, 2:5].ravel())

    def apply(self, addresses: torch.Tensor, values: torch.Tensor) -> None:
        """Carry out writes that were collected in a `StateWrites`; both int32 [n] on this device."""
        self.memory.index_copy_(0, addresses.long(), values)


def heads_of(new: NewSlots) -> IntArray:
    """Their `HEAD`s, int32 [slots, 8], the last two of which are the halves of the seed."""
    return np.frombuffer(new.heads, dtype=np.int32).reshape(-1, HEAD.size // 4)


class StateWrites:
    """The host's writes to a `SlotMemory` before a step: int32 values and the addresses they go to.

    Args:
        new: slots that start.
        records: int32, the slots' records one behind the other, for `SlotMemory.records`.

    Attributes:
        count: values so far.
    """

    def __init__(self, memory: SlotMemory, new: NewSlots = NO_SLOTS, records: Words = NO_RECORDS) -> None:
        self._memory, self._new, self._records = memory, new, records
        for slot, block_count, token_count, *_ in HEAD.iter_unpack(new.heads):
            assert block_count <= memory.block_capacity, f"slot {slot} starts with {block_count} blocks"
            assert token_count <= memory.token_capacity, f"slot {slot} starts with {token_count} tokens"
        self.count = len(new.ids) + len(records)
        self._firsts, self._counts = array("i"), array("i")
        self._values: list[Words] = []

    def add(self, table: str, slot: int, values: Words) -> None:
        """Write values to the start of the slot's row of a table."""
        start, columns = self._memory.places[table]
        count = len(values)
        assert count <= columns, f"{count} values for a row of {table}"
        self.count += count
        self._firsts.append(start + slot * columns)
        self._counts.append(count)
        self._values.append(values)

    def put(self, words: IntArray) -> None:
        """Write the addresses, then the values, to int32 [2 * count]."""
        addresses, values = words[: self.count], memoryview(words)[self.count :]
        id_count = len(self._new.ids)
        end = id_count + len(self._records)
        if self._new:
            self._put_addresses(addresses[:id_count], addresses[id_count:end])
            values[:id_count], values[id_count:end] = self._new.ids, memoryview(self._records)
        if self._values:
            firsts, counts = np.frombuffer(self._firsts, np.int32), np.frombuffer(self._counts, np.int32)
            addresses[end:] = _run_addresses(firsts, counts)
            values[end:] = memoryview(bytearray().join(self._values)).cast("i")

    def _put_addresses(self, ids: IntArray, records: IntArray) -> None:
        """Of what new slots start with: their blocks, their tokens, and their records."""
        memory, counts = self._memory, [*HEAD.iter_unpack(self._new.heads)]
        if len(counts) <= FEW_SLOTS and all(memory.keeps_addresses(head[1], head[2]) for head in counts):
            blocks = [memory.kept_blocks.of(head[0], head[1]) for head in counts]
            tokens = [memory.kept_tokens.of(head[0], head[2]) for head in counts]
            memoryview(ids)[:] = memoryview(b"".join(blocks + tokens)).cast("i")
            memoryview(records)[:] = memoryview(b"".join([memory.records.of(head[0]) for head in counts])).cast("i")
            return
        heads = heads_of(self._new)
        slots = heads[:, 0]
        starts, columns = np.array(memory.id_places, dtype=np.int32).T[:, :, None]
        ids[:] = _run_addresses((slots * columns + starts).ravel(), heads[:, 1:3].T.ravel())
        records[:] = memory.records.table[slots].ravel()

    def arrays(self) -> tuple[IntArray, IntArray]:
        """Addresses and values, int32 [count] each."""
        words = np.empty(2 * self.count, dtype=np.int32)
        self.put(words)
        return words[: self.count], words[self.count :]


def _run_addresses(firsts: IntArray, counts: IntArray) -> IntArray:
    """Of runs of words that lie one behind the other from `firsts` on, `counts` each; all int32."""
    ends = counts.cumsum(dtype=np.int32)
    addresses = (firsts + counts - ends).repeat(counts)
    addresses += np.arange(len(addresses), dtype=np.int32)
    return addresses


class SlotMirror:
    """What the host knows of the slots without reading the device.

    Attributes:
        table: int32 [4, slots]; the following are its rows, int32 [slots] each, in the order of a `HEAD`.
        block_counts: blocks in each slot's table.
        known_lengths, computed_lengths, prompt_lengths: as on the device, once all issued steps have run.
        sampling: of each slot in use, without its seed; None marks a free slot.
        asking: slots whose sampling is not plain.
    """

    def __init__(self, slot_count: int) -> None:
        self.table = np.zeros((4, slot_count), dtype=np.int32)
        self.block_counts, self.known_lengths, self.computed_lengths, self.prompt_lengths = self.table
        self._block_counts, self._known, self._computed, self._prompts = map(memoryview, self.table)  # quicker by one
        self.sampling: list[SlotSampling | None] = [None] * slot_count
        self.asking: set[int] = set()

    def clear(self, slot: int) -> None:
        """Free the slot: its request is gone."""
        assert self.sampling[slot] is not None, f"slot {slot} is cleared, but it is free"
        self.sampling[slot] = None
        self.asking.discard(slot)
        self.advance(slot, 0, 0, 0)

    def start(self, new: NewSlots) -> None:
        """These slots get requests."""
        for slot, block_count, token_count, computed_count, prompt_count, index, _ in HEAD.iter_unpack(new.heads):
            assert slot < len(self.sampling), f"slot {slot} of {len(self.sampling)}"
            assert self.sampling[slot] is None, f"slot {slot} gets a request, but it is not free"
            sampling = self.sampling[slot] = new.samplings[index]
            if not sampling.is_plain:
                self.asking.add(slot)
            self.advance(slot, block_count, token_count, computed_count)
            self._prompts[slot] = prompt_count

    def lengths(self, slot: int) -> tuple[int, int, int]:
        """A slot's blocks, known tokens and computed tokens."""
        return self._block_counts[slot], self._known[slot], self._computed[slot]

    def advance(self, slot: int, block_count: int, known: int, computed: int) -> None:
        """The slot has so many blocks, known tokens and computed tokens."""
        self._block_counts[slot], self._known[slot], self._computed[slot] = block_count, known, computed


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
