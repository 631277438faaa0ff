"""Messages between the frontend and the scheduler: requests in, tokens and figures out."""

from array import array
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from common.errors import RequestError, WireError, shown
from common.messages.fields import (
    POOLINGS,
    TokenLogprobs,
    embedding_by_row,
    embeddings_to_lists,
    empty_i32,
    empty_u8,
    logprobs_by_row,
    logprobs_to_lists,
    token_id,
    token_ids,
)
from common.sampling_params import SamplingParams
from common.wire import INT32_MAX, FieldReader, array_bytes, pack

FINISH_REASONS = ("stop", "length", "abort", "error")
"""How a sample ends: an end token, stop id or stop string; a limit; an abort; a failure inside the engine."""


@dataclass(frozen=True, kw_only=True)
class AddRequest:
    """A request enters the engine.

    Attributes:
        request_id: int32, allotted by the frontend.
        prompt_token_ids: int32.
        params: as the client gave them; `max_tokens` is set by now, `seed` too.
        end_token_ids: ids that end the output: the model's end tokens (unless ignore_eos) and stop_token_ids.
        bad_token_ids: token sequences that the output will not contain (from `bad_words`).
        priority: lower goes first; 0 is the default.
        client_key: who asked, for fair sharing.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        deadline_s: wall clock time after which the request is ended with an error; None for never.
        arrived_at_s: wall clock time of arrival at the frontend.
        outputs: for a request that a process took along when it was lost: what each sample has, int32; None for one
            that has ended. They go on from there. Empty for a new request.
        pooling: one of POOLINGS; with one, the request asks for an embedding of its prompt: `params` has one sample of
            one token, which nobody reads.
    """

    CODE: ClassVar[int] = 1
    request_id: int
    prompt_token_ids: "array[int]"
    params: SamplingParams
    end_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    client_key: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None
    arrived_at_s: float = 0.0
    outputs: "tuple[array[int] | None, ...]" = ()
    pooling: str = ""

    def open_samples(self) -> "list[tuple[int, array[int]]]":
        """The samples that are to run, by index, with the output that each has already."""
        outputs = self.outputs or (empty_i32(),) * self.params.n
        return [(index, output) for index, output in enumerate(outputs) if output is not None]

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [
                self.CODE,
                self.request_id,
                array_bytes(self.prompt_token_ids),
                self.params.to_wire(),
                list(self.end_token_ids),
                [list(ids) for ids in self.bad_token_ids],
                self.priority,
                self.client_key,
                self.cache_salt,
                self.deadline_s,
                self.arrived_at_s,
                [None if output is None else array_bytes(output) for output in self.outputs],
                POOLINGS.index(self.pooling),
            ]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "AddRequest":
        """Build from raw fields; raises WireError."""
        with FieldReader("AddRequest", fields) as read:
            message = cls(
                request_id=read.integer("request_id"),
                prompt_token_ids=read.numbers("prompt_token_ids", "i"),
                params=_params(read.mapping("params")),
                end_token_ids=read.entries("end_token_ids", token_id),
                bad_token_ids=read.entries("bad_token_ids", token_ids),
                priority=read.integer("priority", -INT32_MAX),
                client_key=read.text("client_key", 256),
                cache_salt=read.text("cache_salt", 1024),
                deadline_s=read.optional_number("deadline_s"),
                arrived_at_s=read.number("arrived_at_s"),
                outputs=read.entries("outputs", _output),
                pooling=POOLINGS[read.integer("pooling", 0, len(POOLINGS) - 1)],
            )
        if message.pooling and (message.params.n, message.params.max_tokens) != (1, 1):
            raise WireError("AddRequest: an embedding goes with one sample of one token")
        if message.outputs:
            message._check_outputs()
        return message

    def _check_outputs(self) -> None:
        samples, most = self.open_samples(), self.params.max_tokens
        if len(self.outputs) != self.params.n or not samples:
            raise WireError(f"AddRequest: {len(samples)} open ones of {len(self.outputs)} outputs, n={self.params.n}")
        longest = max(len(output) for _, output in samples)
        if most is not None and longest >= most:
            raise WireError(f"AddRequest: an output of {longest} tokens has ended already: max_tokens is {most}")


@dataclass(frozen=True)
class AbortRequests:
    """The named requests are not wanted any more; unknown and finished ids are ignored. Nothing is sent back."""

    CODE: ClassVar[int] = 2
    request_ids: "array[int]"  # int32

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, array_bytes(self.request_ids)])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "AbortRequests":
        """Build from raw fields; raises WireError."""
        with FieldReader("AbortRequests", fields) as read:
            return cls(read.numbers("request_ids", "i"))


@dataclass(frozen=True)
class AbortSamples:
    """Single samples are not wanted any more, the others of their requests are; as AbortRequests otherwise."""

    CODE: ClassVar[int] = 4
    request_ids: "array[int]"  # int32
    sample_indices: "array[int]"  # uint8, aligned

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, array_bytes(self.request_ids), array_bytes(self.sample_indices)])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "AbortSamples":
        """Build from raw fields; raises WireError."""
        with FieldReader("AbortSamples", fields) as read:
            message = cls(read.numbers("request_ids", "i"), read.numbers("sample_indices", "B"))
        if len(message.request_ids) != len(message.sample_indices):
            raise WireError(
                f"AbortSamples: {len(message.sample_indices)} samples of {len(message.request_ids)} requests"
            )
        return message


@dataclass(frozen=True)
class FlushCache:
    """Forget every cached prefix that no live request holds."""

    CODE: ClassVar[int] = 3

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "FlushCache":
        """Build from raw fields; raises WireError."""
        with FieldReader("FlushCache", fields):
            return cls()


@dataclass(frozen=True)
class MoreFollows:
    """Further requests follow at once: those before this message are a part of what came together.

    It holds until the next request, and for `BELIEVED_S` at most. With `follows` False nothing follows after all.
    """

    CODE: ClassVar[int] = 5
    BELIEVED_S: ClassVar[float] = 0.005
    follows: bool = True

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.follows])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "MoreFollows":
        """Build from raw fields; raises WireError."""
        with FieldReader("MoreFollows", fields) as read:
            return cls(read.flag("follows"))


@dataclass(frozen=True, kw_only=True)
class EngineReady:
    """The engine can serve; its limits, known once the worker has sized the KV cache."""

    CODE: ClassVar[int] = 10
    max_model_len: int
    max_num_seqs: int
    block_size: int
    block_count: int
    vocab_size: int

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [self.CODE, self.max_model_len, self.max_num_seqs, self.block_size, self.block_count, self.vocab_size]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "EngineReady":
        """Build from raw fields; raises WireError."""
        with FieldReader("EngineReady", fields) as read:
            return cls(
                max_model_len=read.integer("max_model_len", 1),
                max_num_seqs=read.integer("max_num_seqs", 1),
                block_size=read.integer("block_size", 1),
                block_count=read.integer("block_count", 1),
                vocab_size=read.integer("vocab_size", 1),
            )


@dataclass(frozen=True)
class SampleFinish:
    """A sample's end: the row of TokensOut whose tokens are its last (a row may hold no token), and why."""

    row_index: int
    reason: str  # one of FINISH_REASONS
    detail: str = ""  # for "error": what went wrong

    def to_list(self) -> list[Any]:
        """The nested array that stands in a message."""
        return [self.row_index, FINISH_REASONS.index(self.reason), self.detail]

    @classmethod
    def from_list(cls, fields: Any) -> "SampleFinish":
        """Build from a nested array; raises WireError."""
        with FieldReader("SampleFinish", fields) as read:
            return cls(
                read.integer("row_index"),
                FINISH_REASONS[read.integer("reason", 0, len(FINISH_REASONS) - 1)],
                read.text("detail"),
            )


@dataclass(frozen=True, kw_only=True)
class TokensOut:
    """New tokens of one step: one row per sample that got tokens or ended.

    Attributes:
        request_ids: int32, one per row.
        sample_indices: uint8, one per row; empty when all are 0.
        token_counts: uint8, one per row; empty when all are 1.
        token_ids: int32, the rows' tokens one after another.
        cached_counts: int32, one per row: prompt tokens that came from the cache, on a sample's first row (-1 on
            others); empty when no row is a first one.
        prefill_us: int32, one per row: microseconds from the first plan that computed a sample's prompt to its first
            token, on the sample's first row (-1 on others); empty when no row is a first one.
        preemption_counts: uint8, one per row: how often the sample has been preempted so far, on its first row since
            it runs again (0 on others); empty when there is no such row.
        finishes: samples that end with this message.
        logprobs: for the tokens that want them; `row_index` counts along `token_ids`.
        prompt_logprobs: pairs of row index and one entry per prompt token from the second on (`row_index` is the
            token's position in the prompt).
        embeddings: pairs of row index and float32 [hidden size], of length 1, for requests that ask for one.
    """

    CODE: ClassVar[int] = 11
    request_ids: "array[int]"
    token_ids: "array[int]"
    sample_indices: "array[int]" = field(default_factory=empty_u8)
    token_counts: "array[int]" = field(default_factory=empty_u8)
    cached_counts: "array[int]" = field(default_factory=empty_i32)
    prefill_us: "array[int]" = field(default_factory=empty_i32)
    preemption_counts: "array[int]" = field(default_factory=empty_u8)
    finishes: tuple[SampleFinish, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()
    embeddings: "tuple[tuple[int, array[float]], ...]" = ()

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [
                self.CODE,
                array_bytes(self.request_ids),
                array_bytes(self.token_ids),
                array_bytes(self.sample_indices),
                array_bytes(self.token_counts),
                array_bytes(self.cached_counts),
                array_bytes(self.prefill_us),
                array_bytes(self.preemption_counts),
                [entry.to_list() for entry in self.finishes],
                [entry.to_list() for entry in self.logprobs],
                logprobs_to_lists(self.prompt_logprobs),
                embeddings_to_lists(self.embeddings),
            ]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "TokensOut":
        """Build from raw fields; raises WireError."""
        if fields[2:] == _NOTHING_MORE:  # nearly every step: the time goes into reading empty fields
            return cls._of_tokens(fields)
        with FieldReader("TokensOut", fields) as read:
            message = cls(
                request_ids=read.numbers("request_ids", "i"),
                token_ids=read.numbers("token_ids", "i"),
                sample_indices=read.numbers("sample_indices", "B"),
                token_counts=read.numbers("token_counts", "B"),
                cached_counts=read.numbers("cached_counts", "i"),
                prefill_us=read.numbers("prefill_us", "i"),
                preemption_counts=read.numbers("preemption_counts", "B"),
                finishes=read.entries("finishes", SampleFinish.from_list),
                logprobs=read.entries("logprobs", TokenLogprobs.from_list),
                prompt_logprobs=read.entries("prompt_logprobs", logprobs_by_row),
                embeddings=read.entries("embeddings", embedding_by_row),
            )
        rows = len(message.request_ids)
        aligned = (
            message.sample_indices, message.token_counts, message.cached_counts, message.prefill_us,
            message.preemption_counts,
        )  # fmt: skip
        if any(len(numbers) not in (0, rows) for numbers in aligned):
            raise WireError(f"TokensOut: per-row arrays must be empty or hold {rows} entries")
        token_count = sum(message.token_counts) if message.token_counts else rows
        if token_count != len(message.token_ids):
            raise WireError(f"TokensOut: {len(message.token_ids)} tokens, the rows' counts add up to {token_count}")
        return message

    @classmethod
    def _of_tokens(cls, fields: list[Any]) -> "TokensOut":
        """A message whose other fields are empty."""
        read = FieldReader("TokensOut", fields)
        message = cls(request_ids=read.numbers("request_ids", "i"), token_ids=read.numbers("token_ids", "i"))
        if len(message.token_ids) != len(message.request_ids):
            raise WireError(f"TokensOut: {len(message.token_ids)} tokens for {len(message.request_ids)} rows")
        return message


_NOTHING_MORE: list[Any] = [b"", b"", b"", b"", b"", [], [], [], []]
"""TokensOut's fields after `token_ids`, if every row is one token of a request's first sample and nothing else."""


@dataclass(frozen=True)
class RequestFailed:
    """A request ends here, all its samples with it: refused on arrival, or ended by a failure or its deadline."""

    CODE: ClassVar[int] = 12
    request_id: int
    error_code: str
    message: str
    status: int = 400
    param: str | None = None
    retry_after_ms: int | None = None

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [self.CODE, self.request_id, self.error_code, self.message, self.status, self.param, self.retry_after_ms]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "RequestFailed":
        """Build from raw fields; raises WireError."""
        with FieldReader("RequestFailed", fields) as read:
            return cls(
                request_id=read.integer("request_id"),
                error_code=read.text("error_code", 64),
                message=read.text("message", 4096),
                status=read.integer("status", 400, 599),
                param=read.optional_text("param", 64),
                retry_after_ms=read.optional_integer("retry_after_ms"),
            )


@dataclass(frozen=True)
class QueueNews:
    """Which requests wait, so that no worker has heard of them, and which do so no more: int32 request ids.

    Said of what has to wait when it comes, and of that when its first step has been planned. Nothing is said of a
    request that runs at once, nor of the end of one that waits.
    """

    CODE: ClassVar[int] = 14
    waiting_ids: "array[int]"
    started_ids: "array[int]"

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, array_bytes(self.waiting_ids), array_bytes(self.started_ids)])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "QueueNews":
        """Build from raw fields; raises WireError."""
        with FieldReader("QueueNews", fields) as read:
            return cls(read.numbers("waiting_ids", "i"), read.numbers("started_ids", "i"))


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Where the engine stands: gauges, counters since start, and the parts of the last steps.

    Attributes:
        *_count: requests or blocks right now; unprepared_count: what the worker said last (`Unprepared`).
        steps to output_tokens: counters since start; *_tokens in tokens.
        last_decode_rows, last_chunk_tokens: the composition of the last step; decode_tokens, chunk_tokens: that of all
            steps together.
        parts_us: int32 [6], mean microseconds of each of STEP_PARTS over the steps since the last EngineStats.
        step_sizes: int32, the same steps by their number of tokens: entry k counts those with more than 2^(k-1) and at
            most 2^k.
    """

    CODE: ClassVar[int] = 13
    GAUGES: ClassVar[tuple[str, ...]] = (
        "running_count", "waiting_count", "swapped_count", "total_block_count", "free_block_count",
        "cached_block_count", "steps", "preemptions", "evictions", "prefix_query_tokens", "prefix_hit_tokens",
        "prompt_tokens", "output_tokens", "last_decode_rows", "last_chunk_tokens", "decode_tokens", "chunk_tokens",
        "unprepared_count",
    )  # fmt: skip
    COUNTERS: ClassVar[tuple[str, ...]] = (
        "steps", "preemptions", "evictions", "prefix_query_tokens", "prefix_hit_tokens", "prompt_tokens",
        "output_tokens", "decode_tokens", "chunk_tokens",
    )  # fmt: skip
    running_count: int = 0
    waiting_count: int = 0
    swapped_count: int = 0
    total_block_count: int = 0
    free_block_count: int = 0
    cached_block_count: int = 0
    steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    last_decode_rows: int = 0
    last_chunk_tokens: int = 0
    decode_tokens: int = 0
    chunk_tokens: int = 0
    unprepared_count: int = 0
    parts_us: "array[int]" = field(default_factory=empty_i32)
    step_sizes: "array[int]" = field(default_factory=empty_i32)

    def after(self, earlier: "EngineStats") -> "EngineStats":
        """These figures, with counters that go on from those of a scheduler before this one."""
        sums = {name: getattr(self, name) + getattr(earlier, name) for name in self.COUNTERS}
        return replace(self, **sums)

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        gauges = [getattr(self, name) for name in self.GAUGES]
        return pack([self.CODE, gauges, array_bytes(self.parts_us), array_bytes(self.step_sizes)])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "EngineStats":
        """Build from raw fields; raises WireError."""
        with FieldReader("EngineStats", fields) as read:
            numbers = read.entries("gauges", _counter, 64)
            parts_us = read.numbers("parts_us", "i", 64)
            step_sizes = read.numbers("step_sizes", "i", 64)
        if len(numbers) != len(cls.GAUGES):
            raise WireError(f"EngineStats.gauges: wanted {len(cls.GAUGES)} numbers, got {len(numbers)}")
        return cls(**dict(zip(cls.GAUGES, numbers, strict=True)), parts_us=parts_us, step_sizes=step_sizes)


def _params(values: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.from_wire(values)
    except RequestError as error:
        raise WireError(f"AddRequest.params: {error}") from None


def _output(value: Any) -> "array[int] | None":
    return None if value is None else FieldReader("AddRequest", [value]).numbers("outputs", "i")


def _counter(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= 2**63:
        raise WireError(f"wanted a counter, got {shown(value)}")
    return value
