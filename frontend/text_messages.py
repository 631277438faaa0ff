"""The messages between the frontend and its text processes, written as all others are (`common.wire`).

    code  message      direction           meaning
    90    EncodeText   to a text process   answered by TokenIds
    91    EncodeChat   to a text process   render with the model's template, then encode; answered by TokenIds
    92    DecodeIds    to a text process   answered by Text
    95    TextReady    to the frontend     the process has loaded its tokenizer
    96    TokenIds     to the frontend     int32
    97    Text         to the frontend
    98    TextRefused  to the frontend     what was wrong with the text or the chat

Every job is answered by one message with its number, in the order of the jobs.
"""

from array import array
from dataclasses import dataclass
from typing import Any, ClassVar

from common.errors import RequestError, WireError, shown
from common.wire import TEXT_LIMIT_BYTES, FieldReader, array_bytes, pack, unpack
from frontend.prompt import ChatPrompt

LIMIT = 4 * TEXT_LIMIT_BYTES
RESULT_LIMIT_BYTES = 4 * LIMIT - 64
"""Of a decoded text in UTF-8, so that it fits a message."""


@dataclass(frozen=True)
class EncodeText:
    """The token ids of a text."""

    CODE: ClassVar[int] = 90
    job_id: int
    text: str
    add_special_tokens: bool

    def to_wire(self) -> bytes:
        """The message as msgpack bytes; lone surrogates become question marks, as in `Tokenizer.encode`."""
        return pack([self.CODE, self.job_id, self.text.encode("utf-8", "replace"), self.add_special_tokens])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "EncodeText":
        """Build from raw fields; raises WireError."""
        read = FieldReader("EncodeText", fields)
        message = cls(read.integer("job_id"), _text(read.blob("text", LIMIT)), read.flag("add_special_tokens"))
        read.done()
        return message


@dataclass(frozen=True)
class EncodeChat:
    """The token ids of a chat."""

    CODE: ClassVar[int] = 91
    job_id: int
    chat: ChatPrompt
    add_special_tokens: bool

    def to_wire(self) -> bytes:
        """The message as msgpack bytes; raises what msgpack does for a chat that it cannot hold."""
        chat = self.chat
        return pack(
            [
                self.CODE,
                self.job_id,
                [dict(message) for message in chat.messages],
                None if chat.tools is None else [dict(tool) for tool in chat.tools],
                chat.add_generation_prompt,
                chat.continue_final_message,
                dict(chat.template_kwargs),
                self.add_special_tokens,
            ]
        )

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "EncodeChat":
        """Build from raw fields; raises WireError. What the maps hold is the template's to judge."""
        read = FieldReader("EncodeChat", fields)
        job_id = read.integer("job_id")
        chat = ChatPrompt(
            messages=read.entries("messages", _mapping),
            tools=_optional_maps(read.anything("tools")),
            add_generation_prompt=read.flag("add_generation_prompt"),
            continue_final_message=read.flag("continue_final_message"),
            template_kwargs=read.mapping("template_kwargs"),
        )
        message = cls(job_id, chat, read.flag("add_special_tokens"))
        read.done()
        return message


@dataclass(frozen=True)
class DecodeIds:
    """The text of token ids (int32)."""

    CODE: ClassVar[int] = 92
    job_id: int
    token_ids: "array[int]"
    skip_special_tokens: bool

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.job_id, array_bytes(self.token_ids), self.skip_special_tokens])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "DecodeIds":
        """Build from raw fields; raises WireError."""
        read = FieldReader("DecodeIds", fields)
        message = cls(read.integer("job_id"), read.numbers("token_ids", "i"), read.flag("skip_special_tokens"))
        read.done()
        return message


@dataclass(frozen=True)
class TextReady:
    """A text process has loaded its tokenizer."""

    CODE: ClassVar[int] = 95
    number: int

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.number])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "TextReady":
        """Build from raw fields; raises WireError."""
        read = FieldReader("TextReady", fields)
        message = cls(read.integer("number"))
        read.done()
        return message


@dataclass(frozen=True)
class TokenIds:
    """The token ids (int32) of a text or a chat."""

    CODE: ClassVar[int] = 96
    job_id: int
    token_ids: "array[int]"

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.job_id, array_bytes(self.token_ids)])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "TokenIds":
        """Build from raw fields; raises WireError."""
        read = FieldReader("TokenIds", fields)
        message = cls(read.integer("job_id"), read.numbers("token_ids", "i", LIMIT))
        read.done()
        return message

    def value(self) -> "array[int]":
        """What the job was for."""
        return self.token_ids


@dataclass(frozen=True)
class Text:
    """The text of token ids."""

    CODE: ClassVar[int] = 97
    job_id: int
    text: str

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.job_id, self.text])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Text":
        """Build from raw fields; raises WireError."""
        read = FieldReader("Text", fields)
        message = cls(read.integer("job_id"), read.text("text", 4 * LIMIT))
        read.done()
        return message

    def value(self) -> str:
        """What the job was for."""
        return self.text


@dataclass(frozen=True)
class TextRefused:
    """A job that cannot be done, as a RequestError says it."""

    CODE: ClassVar[int] = 98
    job_id: int
    message: str
    code: str
    param: str | None
    status: int

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.job_id, self.message, self.code, self.param, self.status])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "TextRefused":
        """Build from raw fields; raises WireError."""
        read = FieldReader("TextRefused", fields)
        message = cls(
            job_id=read.integer("job_id"),
            message=read.text("message"),
            code=read.text("code", 64),
            param=read.optional_text("param", 256),
            status=read.integer("status", 400, 599),
        )
        read.done()
        return message

    def value(self) -> Any:
        """Raises what it says, as a RequestError."""
        raise RequestError(self.message, code=self.code, param=self.param, status=self.status)


ForTextProcess = EncodeText | EncodeChat | DecodeIds
FromTextProcess = TextReady | TokenIds | Text | TextRefused
TextResult = TokenIds | Text | TextRefused

_FOR_TEXT_PROCESS: dict[int, Any] = {kind.CODE: kind for kind in ForTextProcess.__args__}
_FROM_TEXT_PROCESS: dict[int, Any] = {kind.CODE: kind for kind in FromTextProcess.__args__}


def decode_for_text_process(data: bytes) -> ForTextProcess:
    """A message from the frontend; raises WireError."""
    return _decode(data, _FOR_TEXT_PROCESS, "frontend -> text process")  # type: ignore[no-any-return]


def decode_from_text_process(data: bytes) -> FromTextProcess:
    """A message from a text process; raises WireError."""
    return _decode(data, _FROM_TEXT_PROCESS, "text process -> frontend")  # type: ignore[no-any-return]


def job_id_of(data: bytes) -> int:
    """The number of a job that cannot be read otherwise; raises WireError if that cannot be read either."""
    return FieldReader("a job", unpack(data, limit_bytes=4 * LIMIT)[1]).integer("job_id")


def _decode(data: bytes, kinds: dict[int, Any], link: str) -> Any:
    code, fields = unpack(data, limit_bytes=4 * LIMIT)
    if code not in kinds:
        raise WireError(f"type code {code} is not carried by the link {link}")
    return kinds[code].from_fields(fields)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"EncodeText.text: wanted UTF-8: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"wanted a map, got {shown(value)}")
    return value


def _optional_maps(value: Any) -> tuple[dict[str, Any], ...] | None:
    return None if value is None else FieldReader("EncodeChat", [value]).entries("tools", _mapping)
