"""What a plan says of slots that start with it: tokens, blocks and how to sample, in columns.

A step can start hundreds of slots, and nothing runs before the worker has read all of them. So numbers stand in arrays
over all slots, which the worker takes in as a whole, and what requests usually have in common, how they sample, is sent
once for all of them and remembered by its bytes.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from struct import Struct
from typing import Any

from common.errors import WireError, shown
from common.messages.fields import POOLINGS, empty_i32, token_id, token_ids
from common.wire import FieldReader, array_bytes, pack_value, unpack_value

REMEMBERED_BYTES = 1024
"""How a request samples is remembered by its bytes, unless they are more."""

HEAD = Struct("<6iQ")
"""A slot's part of `NewSlots.heads`."""


@dataclass(frozen=True, kw_only=True)
class SlotSampling:
    """What the worker needs to sample for one slot.

    Attributes:
        temperature: 0 is greedy; never so low that logits divided by it leave the range of float32.
        seed: uint64; the noise at a position depends on seed, position and token id alone.
        min_output_count: while the output is shorter, `end_token_ids` cannot be sampled.
        logprobs, prompt_logprobs: how many likeliest tokens to report; -1 for none at all.
        bias_token_ids, bias_values: int32 and float32, aligned.
        allowed_token_ids: int32; empty allows all.
        bad_token_ids: sequences whose last token cannot be sampled after the others.
        masked: every step that samples for the slot brings a mask of the token ids that it allows.
        pooling: one of POOLINGS: the embedding to report with the first sampled token. One of
            EARLY_POOLINGS is of the tokens that were computed since the slot started: none may come from the cache.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_output_count: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1
    end_token_ids: tuple[int, ...] = ()
    bias_token_ids: "array[int]" = field(default_factory=empty_i32)
    bias_values: "array[float]" = field(default_factory=lambda: array("f"))
    allowed_token_ids: "array[int]" = field(default_factory=empty_i32)
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    masked: bool = False
    pooling: str = ""

    def to_list(self) -> list[Any]:
        """All but the seed, for `packed`; what few requests ask for is an array of its own at its end."""
        special = self._special()
        return [
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            list(self.end_token_ids),
            [] if special == _NOTHING_SPECIAL else special,
        ]

    def _special(self) -> list[Any]:
        return [
            self.presence_penalty,
            self.frequency_penalty,
            self.repetition_penalty,
            self.min_output_count,
            self.logprobs,
            self.prompt_logprobs,
            array_bytes(self.bias_token_ids),
            array_bytes(self.bias_values),
            array_bytes(self.allowed_token_ids),
            [list(ids) for ids in self.bad_token_ids],
            self.masked,
            POOLINGS.index(self.pooling),
        ]

    @cached_property
    def is_plain(self) -> bool:
        """Whether it has none of what few requests ask for."""
        return self._special() == _NOTHING_SPECIAL

    def with_seed(self, seed: int) -> "SlotSampling":
        """The same with another seed."""
        changed = object.__new__(SlotSampling)
        changed.__dict__.update(self.__dict__, seed=seed)
        return changed

    @cached_property
    def packed(self) -> bytes:
        """The msgpack array that stands in NewSlots: all but the seed."""
        return pack_value(self.to_list())

    @classmethod
    def from_bytes(cls, data: Any) -> "SlotSampling":
        """The way back of `packed`, with seed 0; one object for equal bytes, as long as it is remembered."""
        if type(data) is not bytes:
            raise WireError(f"wanted the bytes of a SlotSampling, got {shown(data)}")
        return _remembered(data) if len(data) <= REMEMBERED_BYTES else _read(data)

    @classmethod
    def from_list(cls, fields: Any) -> "SlotSampling":
        """Build from a nested array; raises WireError."""
        with FieldReader("SlotSampling", fields) as read:
            return cls(
                temperature=read.number("temperature"),
                top_k=read.integer("top_k"),
                top_p=read.number("top_p"),
                min_p=read.number("min_p"),
                end_token_ids=read.entries("end_token_ids", token_id),
                **read.nested("special", _special_values),
            )


def _special_values(fields: Any) -> dict[str, Any]:
    """What few requests ask for, by name; nothing for an empty array."""
    if fields == []:
        return {}
    with FieldReader("SlotSampling.special", fields) as read:
        return {
            "presence_penalty": read.number("presence_penalty"),
            "frequency_penalty": read.number("frequency_penalty"),
            "repetition_penalty": read.number("repetition_penalty"),
            "min_output_count": read.integer("min_output_count"),
            "logprobs": read.integer("logprobs", -1, 1024),
            "prompt_logprobs": read.integer("prompt_logprobs", -1, 1024),
            "bias_token_ids": read.numbers("bias_token_ids", "i"),
            "bias_values": read.numbers("bias_values", "f"),
            "allowed_token_ids": read.numbers("allowed_token_ids", "i"),
            "bad_token_ids": read.entries("bad_token_ids", token_ids),
            "masked": read.flag("masked"),
            "pooling": POOLINGS[read.integer("pooling", 0, len(POOLINGS) - 1)],
        }


_NOTHING_SPECIAL: list[Any] = SlotSampling()._special()


def _read(data: bytes) -> SlotSampling:
    sampling = SlotSampling.from_list(unpack_value(data))
    sampling.__dict__["packed"] = data  # known already
    return sampling


_remembered = lru_cache(256)(_read)


@dataclass(frozen=True, kw_only=True)
class SlotInit:
    """A request (or a preempted one that resumes) gets a slot: the only message that carries its tokens.

    Attributes:
        slot: where the worker keeps its state; free before this plan.
        token_ids: int32: the prompt, then whatever output it already has.
        prompt_count: how many of them are the prompt's.
        computed_count: how many already have their K/V in `block_ids` (prefix hit); less than len(token_ids).
        block_ids: int32, in order; hold at least `computed_count` tokens. Blocks for the tokens that this plan
            computes may be among them or be appended by the plan's `block_ids`.
        sampling: how to sample.
    """

    slot: int
    token_ids: "array[int]"
    prompt_count: int
    computed_count: int
    block_ids: "array[int]"
    sampling: SlotSampling


@dataclass(frozen=True)
class NewSlots:
    """The slots that start with a plan, in columns; iterating gives each as a SlotInit.

    Attributes:
        heads: a HEAD for each slot: slot, count of its block ids, of its token ids, `computed_count`, `prompt_count`,
            index of its `samplings`, seed.
        ids: int32: the block ids of all slots, then the token ids of all slots.
        samplings: how they sample, but for the seed, which is 0 in them.
    """

    heads: bytes = b""
    ids: "array[int]" = field(default_factory=empty_i32)
    samplings: tuple[SlotSampling, ...] = ()

    @classmethod
    def of(cls, *inits: SlotInit) -> "NewSlots":
        """From single slots."""
        samplings: list[SlotSampling] = []
        heads = []
        for init in inits:
            sampling = init.sampling.with_seed(0)
            if sampling not in samplings:
                samplings.append(sampling)
            counts = len(init.block_ids), len(init.token_ids), init.computed_count, init.prompt_count
            heads.append(HEAD.pack(init.slot, *counts, samplings.index(sampling), init.sampling.seed))
        ids = chain.from_iterable([*(init.block_ids for init in inits), *(init.token_ids for init in inits)])
        return cls(b"".join(heads), array("i", ids), tuple(samplings))

    def __len__(self) -> int:
        return len(self.heads) // HEAD.size

    def __iter__(self) -> Iterator[SlotInit]:
        heads = [*HEAD.iter_unpack(self.heads)]
        block, token = 0, sum(head[1] for head in heads)
        for slot, block_count, token_count, computed_count, prompt_count, index, seed in heads:
            yield SlotInit(
                slot=slot, token_ids=self.ids[token : token + token_count], prompt_count=prompt_count,
                computed_count=computed_count, block_ids=self.ids[block : block + block_count],
                sampling=self.samplings[index].with_seed(seed),
            )  # fmt: skip
            block, token = block + block_count, token + token_count

    @property
    def slots(self) -> list[int]:
        """Their numbers."""
        return [head[0] for head in HEAD.iter_unpack(self.heads)]

    @property
    def block_ids(self) -> "array[int]":
        """The block ids of all of them."""
        return self.ids[: sum(head[1] for head in HEAD.iter_unpack(self.heads))]

    def to_list(self) -> list[Any]:
        """The nested array that stands in a StepPlan; empty for no slots."""
        if not self.heads:
            return []
        return [self.heads, array_bytes(self.ids), [sampling.packed for sampling in self.samplings]]

    @classmethod
    def from_list(cls, fields: Any) -> "NewSlots":
        """Build from a nested array; raises WireError."""
        if fields == []:
            return NO_SLOTS
        with FieldReader("NewSlots", fields) as read:
            new = cls(
                heads=read.blob("heads"),
                ids=read.numbers("ids", "i"),
                samplings=read.entries("samplings", SlotSampling.from_bytes),
            )
        new._check()
        return new

    def _check(self) -> None:
        if len(self.heads) % HEAD.size or not self.heads:
            raise WireError(f"NewSlots: heads of {len(self.heads)} bytes, wanted {HEAD.size} for each slot")
        id_count, sampling_count = 0, len(self.samplings)
        for slot, block_count, token_count, computed_count, prompt_count, index, _ in HEAD.iter_unpack(self.heads):
            id_count += block_count + token_count
            if not (0 <= slot <= 0xFFFF and block_count >= 0 and 0 <= index < sampling_count):
                raise WireError(f"NewSlots: slot {slot} with {block_count} blocks and sampling {index}")
            if not (0 <= computed_count < token_count and 0 < prompt_count <= token_count):
                raise WireError(
                    f"NewSlots: {token_count} tokens with prompt_count {prompt_count} and computed_count "
                    f"{computed_count}"
                )
        if id_count != len(self.ids):
            raise WireError(f"NewSlots: {len(self.ids)} ids, the slots' counts add up to {id_count}")


NO_SLOTS = NewSlots()
