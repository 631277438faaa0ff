"""Messages from the frontend to a client."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from common.client_messages.output import Delta, SampleResult, TokenLogprob, optional_entries
from common.client_messages.requests import ID_LIMIT, IdAlone
from common.errors import WireError, shown
from common.wire import TEXT_LIMIT_BYTES, FieldReader, array_bytes, array_header, pack, pack_value

PARAM_LIMIT = 256
"""Characters of a parameter's name in an ErrorReply at most; a client may have made up a longer one."""


@dataclass(frozen=True)
class Welcome:
    """What the engine serves. `max_model_len` and `vocab_size` are 0 while it is starting.

    Attributes:
        engine: names this engine for as long as it runs, however often its processes are started again; empty if it
            starts none again. Not in version 1.
    """

    CODE: ClassVar[int] = 80
    protocol_version: int
    model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    state: str
    engine: str = ""

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [
                self.CODE,
                self.protocol_version,
                list(self.model_names),
                self.max_model_len,
                self.vocab_size,
                self.state,
                *((self.engine,) if self.protocol_version > 1 else ()),
            ]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Welcome":
        """Build from raw fields; raises WireError."""
        with FieldReader("Welcome", fields) as read:
            version = read.integer("protocol_version")
            return cls(
                version,
                read.entries("model_names", _name),
                read.integer("max_model_len"),
                read.integer("vocab_size"),
                read.text("state", 64),
                read.text("engine", 64) if version > 1 else "",
            )


@dataclass(frozen=True)
class Deltas:
    """What one step of the engine gave this client: pairs of a request id and a Delta.

    Each pair is a row. Whoever writes many may encode them one by one and join them (`wire_of`); nearly every row is
    one token with its text, whose end is the same in every stream (`row_start`, `row_end`).
    """

    CODE: ClassVar[int] = 81
    entries: tuple[tuple[str, Delta], ...]

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return self.wire_of([self.row(request_id, delta) for request_id, delta in self.entries])

    @staticmethod
    def wire_of(rows: Sequence[bytes]) -> bytes:
        """The message with these rows."""
        return b"%b%b%b" % (_DELTAS_START, array_header(len(rows)), b"".join(rows))

    @staticmethod
    def row(request_id: str, delta: Delta) -> bytes:
        """One pair, encoded."""
        return pack([request_id, *delta.to_list()])

    @staticmethod
    def row_start(request_id: str, sample_index: int) -> bytes:
        """What stands before the text in each row of a sample."""
        return array_header(7) + pack_value(request_id) + pack_value(sample_index)

    @staticmethod
    def row_end(text: str, token_id: int) -> bytes:
        """The rest of a row that has one token, and neither log probabilities nor an end."""
        values = pack((text, array_bytes(array("i", (token_id,))), (), None, None))
        return values[1:]  # without the header of an array of five

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Deltas":
        """Build from raw fields; raises WireError."""
        with FieldReader("Deltas", fields) as read:
            return cls(read.entries("entries", _delta))


_DELTAS_START = array_header(2) + pack_value(Deltas.CODE)


@dataclass(frozen=True, kw_only=True)
class Final:
    """The end of a request.

    Attributes:
        samples: by index.
        prompt_token_ids: int32, as they went into the model.
        prompt_logprobs: one entry per prompt token, the first nil; or nil if not asked for.
        prompt_tokens, completion_tokens, cached_tokens: counts; completion over all samples.
        arrived_at_s: wall clock time of the request's arrival at the frontend.
        first_token_s, last_token_s, finished_s: seconds after that, as the frontend saw them; nil for what did not
            happen.
    """

    CODE: ClassVar[int] = 82
    request_id: str
    samples: tuple[SampleResult, ...]
    prompt_token_ids: "array[int]"
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    arrived_at_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    @property
    def text(self) -> str:
        """The first sample's text."""
        return self.samples[0].text

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        prompt = self.prompt_logprobs
        return pack(
            [
                self.CODE,
                self.request_id,
                [sample.to_list() for sample in self.samples],
                array_bytes(self.prompt_token_ids),
                None if prompt is None else [None if entry is None else entry.to_list() for entry in prompt],
                self.prompt_tokens,
                self.completion_tokens,
                self.cached_tokens,
                self.arrived_at_s,
                self.first_token_s,
                self.last_token_s,
                self.finished_s,
            ]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Final":
        """Build from raw fields; raises WireError."""
        with FieldReader("Final", fields) as read:
            return cls(
                request_id=read.text("request_id", ID_LIMIT),
                samples=read.entries("samples", SampleResult.from_list, 1024),
                prompt_token_ids=read.numbers("prompt_token_ids", "i"),
                prompt_logprobs=optional_entries(read.anything("prompt_logprobs")),
                prompt_tokens=read.integer("prompt_tokens"),
                completion_tokens=read.integer("completion_tokens"),
                cached_tokens=read.integer("cached_tokens"),
                arrived_at_s=read.number("arrived_at_s"),
                first_token_s=read.optional_number("first_token_s"),
                last_token_s=read.optional_number("last_token_s"),
                finished_s=read.optional_number("finished_s"),
            )


@dataclass(frozen=True)
class ErrorReply:
    """A request that ends with an error, or a message that could not be read.

    Attributes:
        request_id: the request's; empty if the message had none that could be read.
        code: a short stable name such as `invalid_parameter` or `queue_full`.
        message: what was wanted, what came, what to do.
        param: the parameter at fault, or nil.
        retry_after_ms: when asking again makes sense, or nil.
        status: the HTTP status that says the same.
    """

    CODE: ClassVar[int] = 83
    request_id: str
    code: str
    message: str
    param: str | None = None
    retry_after_ms: int | None = None
    status: int = 400

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.request_id, self.code, self.message, self.param, self.retry_after_ms, self.status])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "ErrorReply":
        """Build from raw fields; raises WireError."""
        with FieldReader("ErrorReply", fields) as read:
            return cls(
                request_id=read.text("request_id", ID_LIMIT),
                code=read.text("code", 64),
                message=read.text("message", 1 << 16),
                param=read.optional_text("param", PARAM_LIMIT),
                retry_after_ms=read.optional_integer("retry_after_ms"),
                status=read.integer("status", 400, 599),
            )


@dataclass(frozen=True)
class TokenizeReply:
    """The token ids (int32) of a prompt."""

    CODE: ClassVar[int] = 84
    request_id: str
    token_ids: "array[int]"

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.request_id, array_bytes(self.token_ids)])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "TokenizeReply":
        """Build from raw fields; raises WireError."""
        with FieldReader("TokenizeReply", fields) as read:
            return cls(read.text("request_id", ID_LIMIT), read.numbers("token_ids", "i"))


@dataclass(frozen=True)
class DetokenizeReply:
    """The text of token ids."""

    CODE: ClassVar[int] = 85
    request_id: str
    text: str

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.request_id, self.text])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "DetokenizeReply":
        """Build from raw fields; raises WireError."""
        with FieldReader("DetokenizeReply", fields) as read:
            return cls(read.text("request_id", ID_LIMIT), read.text("text", 4 * TEXT_LIMIT_BYTES))


@dataclass(frozen=True)
class StatusReply:
    """How the engine is.

    Attributes:
        state: `starting`, `serving`, `restarting`, `draining` or `dead`.
        detail: for `restarting` and `dead`: why.
        live_count: requests that have not ended.
        limits: the engine's limits by name (EngineReady), empty while it is starting.
        figures: gauges and counters by name (EngineStats); `restarts`: how often a lost process was started again;
            `step_<part>_us`: microseconds that each part of the steps (STEP_PARTS) took since start, all together.
    """

    CODE: ClassVar[int] = 86
    request_id: str
    state: str
    detail: str
    model_names: tuple[str, ...]
    live_count: int
    limits: Mapping[str, int]
    figures: Mapping[str, int]

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [
                self.CODE,
                self.request_id,
                self.state,
                self.detail,
                list(self.model_names),
                self.live_count,
                dict(self.limits),
                dict(self.figures),
            ]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "StatusReply":
        """Build from raw fields; raises WireError."""
        with FieldReader("StatusReply", fields) as read:
            return cls(
                request_id=read.text("request_id", ID_LIMIT),
                state=read.text("state", 64),
                detail=read.text("detail", 1 << 16),
                model_names=read.entries("model_names", _name),
                live_count=read.integer("live_count"),
                limits=read.mapping("limits"),
                figures=read.mapping("figures"),
            )


@dataclass(frozen=True)
class EmbedReply:
    """A prompt's embedding.

    Attributes:
        embedding: float32 [hidden size], of length 1.
        prompt_tokens, cached_tokens: counts.
    """

    CODE: ClassVar[int] = 88
    request_id: str
    embedding: "array[float]"
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.request_id, array_bytes(self.embedding), self.prompt_tokens, self.cached_tokens])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "EmbedReply":
        """Build from raw fields; raises WireError."""
        with FieldReader("EmbedReply", fields) as read:
            return cls(
                read.text("request_id", ID_LIMIT),
                read.numbers("embedding", "f"),
                read.integer("prompt_tokens"),
                read.integer("cached_tokens"),
            )


class Pong(IdAlone):
    """Answer to Ping."""

    CODE = 87


def _delta(value: Any) -> tuple[str, Delta]:
    if not isinstance(value, list) or not value or not isinstance(value[0], str) or len(value[0]) > ID_LIMIT:
        raise WireError("Deltas: wanted arrays that start with a request id")
    return value[0], Delta.from_list(value[1:])


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise WireError(f"wanted a name, got {shown(value)}")
    return value
