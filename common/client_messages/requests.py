"""Messages from a client to the frontend."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from common.client_messages.output import SampleSoFar
from common.errors import RequestError, WireError, shown
from common.sampling_params import SAMPLE_LIMIT
from common.wire import INT32_MAX, FieldReader, array_bytes, pack

CLIENT_PROTOCOL_VERSION = 4
"""The version that we speak. Earlier ones are still understood: version 3 has no MORE_FOLLOWS, version 2 no more than
one message in what is sent at once, version 1 lacks `Welcome.engine` too."""
OLDEST_CLIENT_PROTOCOL_VERSION = 1
FRAMES_LIMIT = 16
"""Messages that a client may send at once, as frames of one ZeroMQ message: they arrive together, so that requests
share a step from the first one on. More would keep the first ones waiting for the last to be written."""
MORE_FOLLOWS = b""
"""As the last frame behind messages that are sent at once: more requests follow, so that a step may wait for them."""
ID_LIMIT = 256
CHAT_MESSAGE_LIMIT = 4096
"""Chat messages in one prompt, at most."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text, token ids (an int32 byte string on the wire), or a chat (an array of maps).

To send, also a map with `prompt_token_ids` or `prompt`.
"""


@dataclass(frozen=True)
class IdAlone:
    """What all messages are that hold nothing but a request's id; each has its CODE and its name."""

    CODE: ClassVar[int]
    request_id: str

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.request_id])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> Self:
        """Build from raw fields; raises WireError."""
        with FieldReader(cls.__name__, fields) as read:
            return cls(read.text("request_id", ID_LIMIT))


@dataclass(frozen=True)
class Hello:
    """The client introduces itself; a version that the engine does not speak is answered by an ErrorReply."""

    CODE: ClassVar[int] = 60
    protocol_version: int = CLIENT_PROTOCOL_VERSION
    client_name: str = ""

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.protocol_version, self.client_name])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Hello":
        """Build from raw fields; raises WireError."""
        with FieldReader("Hello", fields) as read:
            return cls(read.integer("protocol_version"), read.text("client_name", ID_LIMIT))


@dataclass(frozen=True, kw_only=True)
class Generate:
    """A request.

    Attributes:
        request_id: the client's name for it.
        prompt: a text, token ids, or chat messages.
        params: sampling parameters by name, as `SamplingParams` has them; only those named here are set.
        model_defaults: take what is not named from the model's generation_config.json, where that says anything.
        stream: send Deltas on the way.
        priority: lower goes first.
        cache_salt: cached prefixes are shared only under the same salt.
        timeout_ms: milliseconds after which the request ends with an error; nil for never.
        add_special_tokens: put BOS before the prompt as the tokenizer does; nil does so for texts, not for chats.
        chat: for chats: `tools`, `add_generation_prompt`, `continue_final_message`, `template_kwargs`; each may be
            missing. The template itself is the operator's to choose: a foreign one could run for ever.
    """

    CODE: ClassVar[int] = 61
    request_id: str
    prompt: Prompt
    params: Mapping[str, Any] = field(default_factory=dict)
    model_defaults: bool = True
    stream: bool = True
    priority: int = 0
    cache_salt: str = ""
    timeout_ms: int | None = None
    add_special_tokens: bool | None = None
    chat: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a list of chat messages."""
        given = self.prompt
        return not isinstance(given, str | array | Mapping) and bool(given) and isinstance(given[0], Mapping)

    def to_list(self) -> list[Any]:
        """The message as an array, which also stands in a Resume."""
        return [
            self.CODE,
            self.request_id,
            _prompt_to_wire(self.prompt),
            dict(self.params),
            self.model_defaults,
            self.stream,
            self.priority,
            self.cache_salt,
            self.timeout_ms,
            self.add_special_tokens,
            dict(self.chat),
        ]

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(self.to_list())

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Generate":
        """Build from raw fields; raises WireError. The values in `params` and `chat` are the caller's to check."""
        with FieldReader("Generate", fields) as read:
            return cls(
                request_id=read.text("request_id", ID_LIMIT),
                prompt=_prompt_from_wire(read.anything("prompt")),
                params=read.mapping("params"),
                model_defaults=read.flag("model_defaults"),
                stream=read.flag("stream"),
                priority=read.integer("priority", -INT32_MAX),
                cache_salt=read.text("cache_salt", 1024),
                timeout_ms=read.optional_integer("timeout_ms", 1),
                add_special_tokens=_optional_flag(read.anything("add_special_tokens")),
                chat=read.mapping("chat"),
            )


class Abort(IdAlone):
    """End a request."""

    CODE = 62


@dataclass(frozen=True)
class Tokenize:
    """Which token ids a prompt has: a text, or a chat with `chat` as in Generate."""

    CODE: ClassVar[int] = 63
    request_id: str
    prompt: Prompt
    add_special_tokens: bool | None = None
    chat: Mapping[str, Any] = field(default_factory=dict)

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(
            [self.CODE, self.request_id, _prompt_to_wire(self.prompt), self.add_special_tokens, dict(self.chat)]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Tokenize":
        """Build from raw fields; raises WireError."""
        with FieldReader("Tokenize", fields) as read:
            return cls(
                read.text("request_id", ID_LIMIT),
                _prompt_from_wire(read.anything("prompt")),
                _optional_flag(read.anything("add_special_tokens")),
                read.mapping("chat"),
            )


@dataclass(frozen=True)
class Detokenize:
    """The text of token ids (int32)."""

    CODE: ClassVar[int] = 64
    request_id: str
    token_ids: "array[int]"
    skip_special_tokens: bool = False

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.request_id, array_bytes(self.token_ids), self.skip_special_tokens])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Detokenize":
        """Build from raw fields; raises WireError."""
        with FieldReader("Detokenize", fields) as read:
            return cls(
                read.text("request_id", ID_LIMIT), read.numbers("token_ids", "i"), read.flag("skip_special_tokens")
            )


@dataclass(frozen=True, kw_only=True)
class Embed:
    """A prompt whose embedding is wanted.

    Attributes:
        pooling: `last`, `mean` or `cls`; empty for what the engine was started with.
        request_id, prompt, priority, cache_salt, timeout_ms, add_special_tokens, chat: as in Generate.
    """

    CODE: ClassVar[int] = 67
    request_id: str
    prompt: Prompt
    pooling: str = ""
    priority: int = 0
    cache_salt: str = ""
    timeout_ms: int | None = None
    add_special_tokens: bool | None = None
    chat: Mapping[str, Any] = field(default_factory=dict)

    def to_list(self) -> list[Any]:
        """The message as an array, which also stands in a Resume."""
        return [
            self.CODE,
            self.request_id,
            _prompt_to_wire(self.prompt),
            self.pooling,
            self.priority,
            self.cache_salt,
            self.timeout_ms,
            self.add_special_tokens,
            dict(self.chat),
        ]

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack(self.to_list())

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Embed":
        """Build from raw fields; raises WireError. The values in `chat` are the caller's to check."""
        with FieldReader("Embed", fields) as read:
            return cls(
                request_id=read.text("request_id", ID_LIMIT),
                prompt=_prompt_from_wire(read.anything("prompt")),
                pooling=read.text("pooling", 64),
                priority=read.integer("priority", -INT32_MAX),
                cache_salt=read.text("cache_salt", 1024),
                timeout_ms=read.optional_integer("timeout_ms", 1),
                add_special_tokens=_optional_flag(read.anything("add_special_tokens")),
                chat=read.mapping("chat"),
            )


@dataclass(frozen=True)
class Resume:
    """Ask again for a request that the engine lost with its frontend process: it goes on from what the client has.

    Attributes:
        request: as it was sent; `timeout_ms` is what is left of it.
        samples: what has come of it, of samples of which something has; none for an embedding.
    """

    CODE: ClassVar[int] = 68
    request: Generate | Embed
    samples: tuple[SampleSoFar, ...] = ()

    @property
    def request_id(self) -> str:
        """The request's."""
        return self.request.request_id

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.request.to_list(), [sample.to_list() for sample in self.samples]])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Resume":
        """Build from raw fields; raises WireError."""
        with FieldReader("Resume", fields) as read:
            return cls(
                read.nested("request", _request_of_list), read.entries("samples", SampleSoFar.from_list, SAMPLE_LIMIT)
            )


class GetStatus(IdAlone):
    """How the engine is."""

    CODE = 65


class Ping(IdAlone):
    """Whether anybody is there."""

    CODE = 66


def _prompt_to_wire(prompt: Any) -> Any:
    """A prompt as the wire has it; ids may be of any type that stands for an integer, but for booleans.

    Raises:
        RequestError: what was given is no prompt. Nothing is left out.
    """
    if isinstance(prompt, Mapping):
        prompt = _prompt_of_map(prompt)
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, array) and prompt.typecode == "i":
        return array_bytes(prompt)
    try:
        if type(prompt) is list and set(map(type, prompt)) == {int}:  # nearly always, and most of what follows is slow
            return array_bytes(array("i", prompt))
        if isinstance(prompt, bytes | bytearray | memoryview | set | frozenset) or not isinstance(prompt, Iterable):
            raise TypeError(f"got {type(prompt).__name__}")
        entries = list(prompt)
        kinds = set(map(type, entries))
        if kinds and all(issubclass(kind, Mapping) for kind in kinds):
            return [dict(message) for message in entries]
        if bool in kinds:
            raise TypeError("got a boolean")
        return array_bytes(array("i", entries))
    except (TypeError, OverflowError) as error:
        wanted = "wanted a text, a list of token ids (int32), or a list of chat messages"
        raise RequestError(f"prompt: {wanted}: {error}", param="prompt") from None


def _prompt_of_map(prompt: Mapping[Any, Any]) -> Any:
    """The ids, else the text, of a map that has nothing beside them; raises RequestError."""
    given = {key: value for key, value in prompt.items() if value is not None}
    if not given or not given.keys() <= {"prompt_token_ids", "prompt"}:
        names = ", ".join(sorted(map(str, given))) or "neither"
        wanted = "wanted a map with `prompt_token_ids` or `prompt` and nothing else"
        raise RequestError(f"prompt: {wanted}, got {names}", param="prompt")
    return given.get("prompt_token_ids", given.get("prompt"))


def _prompt_from_wire(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return FieldReader("prompt", [value]).numbers("token_ids", "i")
    if not isinstance(value, list) or not 0 < len(value) <= CHAT_MESSAGE_LIMIT:
        raise WireError(f"prompt: wanted a text, int32 token ids as bytes, or 1 to {CHAT_MESSAGE_LIMIT} chat messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WireError("prompt: wanted chat messages, each a map with a `role`")
    return value


def _request_of_list(value: Any) -> Generate | Embed:
    kinds: dict[Any, type[Generate] | type[Embed]] = {Generate.CODE: Generate, Embed.CODE: Embed}
    code = value[0] if isinstance(value, list) and value else None
    if type(code) is not int or code not in kinds:
        raise WireError(f"Resume.request: wanted a Generate or an Embed as an array, got {shown(value)}")
    return kinds[code].from_fields(value[1:])


def _optional_flag(value: Any) -> bool | None:
    if value is not None and type(value) is not bool:
        raise WireError(f"wanted a boolean or nil, got {shown(value)}")
    return value
