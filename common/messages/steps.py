"""Messages between the scheduler and the workers: step plans out, results back."""

from array import array
from dataclasses import dataclass, field
from typing import Any, ClassVar

from common.errors import WireError
from common.messages.fields import (
    WORKER_PARTS,
    TokenLogprobs,
    embedding_by_row,
    embeddings_to_lists,
    empty_i32,
    empty_u8,
    empty_u16,
    logprobs_by_row,
    logprobs_to_lists,
    token_mask,
)
from common.messages.slots import NO_SLOTS, NewSlots
from common.wire import FieldReader, array_bytes, pack

PROTOCOL_VERSION = 8
NOT_A_TOKEN = -1
"""Stands for a sampled token when the logits were not numbers, or left nothing to sample."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: which slots compute how many tokens, and what changes before they do.

    The worker carries it out in this order: cleared slots, swap-outs, block copies, swap-ins, new slots, appended
    blocks, then the forward pass over the rows, decode rows first. A slot stands in at most one row. A decode row
    computes the one token at the end of what the slot knows, and samples. A chunk row computes the next
    `chunk_token_counts[i]` known tokens and samples only if `chunk_samples[i]` is 1, that is, if they are the last
    known ones. A block that a row writes to is in no other slot's table: what a row reads besides its own new tokens
    was complete before the forward pass. A plan without rows only swaps blocks out, when nobody can run before that; it
    has a result like any other.

    Attributes:
        step_id: counts up from 1; results come back in the same order.
        decode_slots: uint16.
        decode_block_counts: uint8, new blocks appended to each decode row's table; empty when none gets any.
        chunk_slots: uint16.
        chunk_token_counts: int32, one per chunk row.
        chunk_samples: uint8 (0 or 1), one per chunk row.
        chunk_block_counts: int32, new blocks appended to each chunk row's table.
        block_ids: int32: the appended blocks of all rows, in row order.
        new_slots: slots that start with this step.
        cleared_slots: uint16: slots whose request is gone; nothing reads their state any more.
        copy_block_ids: int32 pairs (source, destination) on the device.
        swap_out_block_ids: int32 pairs (device block, host block).
        swap_in_block_ids: int32 pairs (host block, device block).
        mask_slots: uint16: the slots of this step's rows that sample under a mask.
        masks: for each of them, ceil(vocab_size / 32) little-endian uint32 words: bit i % 32 of word i // 32 is set if
            token id i may be sampled.
    """

    CODE: ClassVar[int] = 30
    step_id: int
    decode_slots: "array[int]" = field(default_factory=empty_u16)
    decode_block_counts: "array[int]" = field(default_factory=empty_u8)
    chunk_slots: "array[int]" = field(default_factory=empty_u16)
    chunk_token_counts: "array[int]" = field(default_factory=empty_i32)
    chunk_samples: "array[int]" = field(default_factory=empty_u8)
    chunk_block_counts: "array[int]" = field(default_factory=empty_i32)
    block_ids: "array[int]" = field(default_factory=empty_i32)
    new_slots: NewSlots = NO_SLOTS
    cleared_slots: "array[int]" = field(default_factory=empty_u16)
    copy_block_ids: "array[int]" = field(default_factory=empty_i32)
    swap_out_block_ids: "array[int]" = field(default_factory=empty_i32)
    swap_in_block_ids: "array[int]" = field(default_factory=empty_i32)
    mask_slots: "array[int]" = field(default_factory=empty_u16)
    masks: tuple[bytes, ...] = ()

    @property
    def token_count(self) -> int:
        """Tokens that the step computes."""
        return len(self.decode_slots) + sum(self.chunk_token_counts)

    @property
    def sampled_slots(self) -> list[int]:
        """The slots that sample, in the order of the result's tokens."""
        chunks = [slot for slot, samples in zip(self.chunk_slots, self.chunk_samples, strict=True) if samples]
        return [*self.decode_slots, *chunks]

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [
                self.CODE,
                self.step_id,
                array_bytes(self.decode_slots),
                array_bytes(self.decode_block_counts),
                array_bytes(self.chunk_slots),
                array_bytes(self.chunk_token_counts),
                array_bytes(self.chunk_samples),
                array_bytes(self.chunk_block_counts),
                array_bytes(self.block_ids),
                self.new_slots.to_list(),
                array_bytes(self.cleared_slots),
                array_bytes(self.copy_block_ids),
                array_bytes(self.swap_out_block_ids),
                array_bytes(self.swap_in_block_ids),
                array_bytes(self.mask_slots),
                self.masks,
            ]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "StepPlan":
        """Build from raw fields; raises WireError."""
        if fields[2:] == _ONLY_DECODES:  # nearly every step: most of the time goes into reading empty fields
            with FieldReader("StepPlan", fields[:2]) as read:
                return cls(step_id=read.integer("step_id", 1, 2**53), decode_slots=read.numbers("decode_slots", "H"))
        with FieldReader("StepPlan", fields) as read:
            message = cls(
                step_id=read.integer("step_id", 1, 2**53),
                decode_slots=read.numbers("decode_slots", "H"),
                decode_block_counts=read.numbers("decode_block_counts", "B"),
                chunk_slots=read.numbers("chunk_slots", "H"),
                chunk_token_counts=read.numbers("chunk_token_counts", "i"),
                chunk_samples=read.numbers("chunk_samples", "B"),
                chunk_block_counts=read.numbers("chunk_block_counts", "i"),
                block_ids=read.numbers("block_ids", "i"),
                new_slots=read.nested("new_slots", NewSlots.from_list),
                cleared_slots=read.numbers("cleared_slots", "H"),
                copy_block_ids=read.numbers("copy_block_ids", "i"),
                swap_out_block_ids=read.numbers("swap_out_block_ids", "i"),
                swap_in_block_ids=read.numbers("swap_in_block_ids", "i"),
                mask_slots=read.numbers("mask_slots", "H"),
                masks=read.entries("masks", token_mask),
            )
        message._check_counts()
        return message

    def _check_counts(self) -> None:
        chunks = len(self.chunk_slots)
        if not chunks == len(self.chunk_token_counts) == len(self.chunk_samples) == len(self.chunk_block_counts):
            raise WireError(f"StepPlan: per-chunk arrays must hold {chunks} entries")
        if len(self.decode_block_counts) not in (0, len(self.decode_slots)):
            raise WireError(f"StepPlan: decode_block_counts must be empty or hold {len(self.decode_slots)} entries")
        block_count = sum(self.decode_block_counts) + sum(self.chunk_block_counts)
        if block_count != len(self.block_ids):
            raise WireError(f"StepPlan: {len(self.block_ids)} block ids, the rows' counts add up to {block_count}")
        if len(self.masks) != len(self.mask_slots):
            raise WireError(f"StepPlan: {len(self.masks)} masks for {len(self.mask_slots)} slots")


_ONLY_DECODES: list[Any] = [b"", b"", b"", b"", b"", b"", [], b"", b"", b"", b"", b"", []]
"""StepPlan's fields after `decode_slots`, if no slot starts, ends, gets a block, or computes more than one token."""


@dataclass(frozen=True, kw_only=True)
class WorkerReady:
    """The worker has loaded the model, sized its KV cache and run a first forward pass.

    Attributes:
        max_model_len: tokens a request may hold: the model's limit, the option's, or what fits, whichever is least.
        block_count: KV blocks on the device; host_block_count: in the swap pool.
        block_bytes: bytes of one block over all layers.
        link_bytes_per_s: how fast blocks move to the swap pool and back, measured; 0: there is no pool.
        unprepared_count: as in `Unprepared`.
    """

    CODE: ClassVar[int] = 20
    protocol_version: int
    rank: int
    max_model_len: int
    block_size: int
    block_count: int
    host_block_count: int
    block_bytes: int
    vocab_size: int
    device_name: str
    link_bytes_per_s: int = 0
    unprepared_count: int = 0

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [
                self.CODE,
                self.protocol_version,
                self.rank,
                self.max_model_len,
                self.block_size,
                self.block_count,
                self.host_block_count,
                self.block_bytes,
                self.vocab_size,
                self.device_name,
                self.link_bytes_per_s,
                self.unprepared_count,
            ]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "WorkerReady":
        """Build from raw fields; raises WireError, also for another protocol version."""
        with FieldReader("WorkerReady", fields) as read:
            version = read.integer("protocol_version")
            if version != PROTOCOL_VERSION:
                raise WireError(
                    f"WorkerReady: the worker speaks protocol version {version}, this is {PROTOCOL_VERSION}"
                )
            return cls(
                protocol_version=version,
                rank=read.integer("rank"),
                max_model_len=read.integer("max_model_len", 1),
                block_size=read.integer("block_size", 1),
                block_count=read.integer("block_count", 1),
                host_block_count=read.integer("host_block_count"),
                block_bytes=read.integer("block_bytes", 1, 2**53),
                vocab_size=read.integer("vocab_size", 1),
                device_name=read.text("device_name", 256),
                link_bytes_per_s=read.integer("link_bytes_per_s", 0, 2**53),
                unprepared_count=read.integer("unprepared_count"),
            )


@dataclass(frozen=True)
class Unprepared:
    """For how many sizes of steps the worker has yet to prepare, in pauses: on a GPU, to capture a CUDA Graph.

    Said whenever the number is another than it was, in order with the results.
    """

    CODE: ClassVar[int] = 22
    count: int

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.count])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Unprepared":
        """Build from raw fields; raises WireError."""
        with FieldReader("Unprepared", fields) as read:
            return cls(read.integer("count"))


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step sampled.

    Attributes:
        step_id: the plan's.
        token_ids: int32: the sampled slots' tokens, in the order of `StepPlan.sampled_slots`; NOT_A_TOKEN where
            the logits were not numbers (that request fails, the others go on).
        token_counts: uint8, tokens per sampled slot; empty when each has one.
        logprobs: for slots that asked; `row_index` counts along `token_ids`.
        prompt_logprobs: pairs of slot and entries for the prompt positions whose logits this step computed;
            `row_index` is the position in the prompt of the token that was predicted.
        parts_us: int32, microseconds of WORKER_PARTS (input, forward, sampling, report); may be empty.
        embeddings: pairs of slot and float32 [hidden size], of length 1, for slots that asked and sampled.
    """

    CODE: ClassVar[int] = 21
    step_id: int
    token_ids: "array[int]"
    token_counts: "array[int]" = field(default_factory=empty_u8)
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()
    parts_us: "array[int]" = field(default_factory=empty_i32)
    embeddings: "tuple[tuple[int, array[float]], ...]" = ()

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [
                self.CODE,
                self.step_id,
                array_bytes(self.token_ids),
                array_bytes(self.token_counts),
                [entry.to_list() for entry in self.logprobs],
                logprobs_to_lists(self.prompt_logprobs),
                array_bytes(self.parts_us),
                embeddings_to_lists(self.embeddings),
            ]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "StepResult":
        """Build from raw fields; raises WireError."""
        with FieldReader("StepResult", fields) as read:
            message = cls(
                step_id=read.integer("step_id", 1, 2**53),
                token_ids=read.numbers("token_ids", "i"),
                token_counts=read.numbers("token_counts", "B"),
                logprobs=read.entries("logprobs", TokenLogprobs.from_list),
                prompt_logprobs=read.entries("prompt_logprobs", logprobs_by_row),
                parts_us=read.numbers("parts_us", "i", 64),
                embeddings=read.entries("embeddings", embedding_by_row),
            )
        if len(message.parts_us) not in (0, len(WORKER_PARTS)):
            raise WireError(
                f"StepResult.parts_us: wanted 0 or {len(WORKER_PARTS)} numbers, got {len(message.parts_us)}"
            )
        return message
