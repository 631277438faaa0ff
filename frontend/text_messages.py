"""The messages between the frontend and its text processes, written as all others are (`common.wire`).

    code  message      direction           meaning
    90    EncodeText   to a text process   answered by TokenIds
    91    EncodeChat   to a text process   render with the model's template, then encode; answered by TokenIds
    92    DecodeIds    to a text process   answered by Text
    93    ParseJson    to a text process   answered by Json
    95    TextReady    to the frontend     the process has loaded its tokenizer
    96    TokenIds     to the frontend     int32
    97    Text         to the frontend
    98    TextRefused  to the frontend     what was wrong with the text, the chat or the body
    99    Json         to the frontend     a parsed body

Every job is answered by one message with its number, in the order of the jobs. The last field of EncodeText and of
ParseJson, which may have megabytes, is a frame of its own behind the message, so that nobody copies it.
"""

from array import array
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from common.errors import RequestError, WireError, shown
from common.wire import TEXT_LIMIT_BYTES, FieldReader, array_bytes, decode, kinds_of, pack, unpack
from frontend.large_json import LargeBody, too_deep
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

    def to_frames(self) -> list[bytes]:
        """The message as msgpack bytes, and its text; lone surrogates become question marks, as in `Tokenizer`."""
        return [pack([self.CODE, self.job_id, self.add_special_tokens]), self.text.encode("utf-8", "replace")]

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "EncodeText":
        """Build from raw fields; raises WireError."""
        with FieldReader("EncodeText", fields) as read:
            job_id, add_special_tokens = read.integer("job_id"), read.flag("add_special_tokens")
            return cls(job_id, _text(read.blob("text", LIMIT)), add_special_tokens)


@dataclass(frozen=True)
class EncodeChat:
    """The token ids of a chat."""

    CODE: ClassVar[int] = 91
    job_id: int
    chat: ChatPrompt
    add_special_tokens: bool

    def to_frames(self) -> list[bytes]:
        """The message as msgpack bytes; raises what msgpack does for a chat that it cannot hold."""
        chat = self.chat
        fields = [
            self.CODE,
            self.job_id,
            [dict(message) for message in chat.messages],
            None if chat.tools is None else [dict(tool) for tool in chat.tools],
            chat.add_generation_prompt,
            chat.continue_final_message,
            dict(chat.template_kwargs),
            self.add_special_tokens,
        ]
        return [pack(fields)]

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "EncodeChat":
        """Build from raw fields; raises WireError. What the maps hold is the template's to judge."""
        with FieldReader("EncodeChat", fields) as read:
            job_id = read.integer("job_id")
            chat = ChatPrompt(
                messages=read.entries("messages", _mapping),
                tools=_optional_maps(read.anything("tools")),
                add_generation_prompt=read.flag("add_generation_prompt"),
                continue_final_message=read.flag("continue_final_message"),
                template_kwargs=read.mapping("template_kwargs"),
            )
            return cls(job_id, chat, read.flag("add_special_tokens"))


@dataclass(frozen=True)
class DecodeIds:
    """The text of token ids (int32)."""

    CODE: ClassVar[int] = 92
    job_id: int
    token_ids: "array[int]"
    skip_special_tokens: bool

    def to_frames(self) -> list[bytes]:
        """The message as msgpack bytes."""
        return [pack([self.CODE, self.job_id, array_bytes(self.token_ids), self.skip_special_tokens])]

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "DecodeIds":
        """Build from raw fields; raises WireError."""
        with FieldReader("DecodeIds", fields) as read:
            return cls(read.integer("job_id"), read.numbers("token_ids", "i"), read.flag("skip_special_tokens"))


@dataclass(frozen=True)
class ParseJson:
    """The values of a JSON body, and the token ids that some of its fields may hold."""

    CODE: ClassVar[int] = 93
    job_id: int
    body: bytes
    id_fields: tuple[str, ...] = ()

    def to_frames(self) -> list[bytes]:
        """The message as msgpack bytes, and the body."""
        return [pack([self.CODE, self.job_id, list(self.id_fields)]), self.body]

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "ParseJson":
        """Build from raw fields; raises WireError."""
        with FieldReader("ParseJson", fields) as read:
            job_id, id_fields = read.integer("job_id"), read.entries("id_fields", _name)
            return cls(job_id, read.blob("body", LIMIT), id_fields)


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
        with FieldReader("TextReady", fields) as read:
            return cls(read.integer("number"))


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
        with FieldReader("TokenIds", fields) as read:
            return cls(read.integer("job_id"), read.numbers("token_ids", "i", LIMIT))

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
        with FieldReader("Text", fields) as read:
            return cls(read.integer("job_id"), read.text("text", 4 * LIMIT))

    def value(self) -> str:
        """What the job was for."""
        return self.text


@dataclass(frozen=True)
class Json:
    """A parsed body: its values, as msgpack of their own, and the fields that hold token ids.

    Attributes:
        token_ids: name, whether it is a list of lists, and the lists; int32.
    """

    CODE: ClassVar[int] = 99
    job_id: int
    values: bytes
    token_ids: "tuple[tuple[str, bool, tuple[array[int], ...]], ...]" = ()

    @classmethod
    def of(cls, job_id: int, body: LargeBody) -> "Json":
        """The message that brings a body; raises RequestError for values that msgpack cannot hold."""
        try:
            values = msgspec.msgpack.encode(body.values)
        except OverflowError:
            raise RequestError("the body holds an integer of more than 64 bits", code="invalid_json") from None
        except RecursionError:
            raise too_deep() from None
        lists = (
            (name, True, tuple(ids)) if isinstance(ids, list) else (name, False, (ids,))
            for name, ids in body.token_ids.items()
        )  # fmt: skip
        return cls(job_id, values, tuple(lists))

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        lists = [[name, nested, [array_bytes(ids) for ids in lists]] for name, nested, lists in self.token_ids]
        return pack([self.CODE, self.job_id, self.values, lists])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Json":
        """Build from raw fields; raises WireError."""
        with FieldReader("Json", fields) as read:
            job_id, values = read.integer("job_id"), read.blob("values", LIMIT)
            return cls(job_id, values, read.entries("token_ids", _id_lists))

    def value(self) -> LargeBody:
        """What the job was for.

        Raises:
            RequestError: nested too deeply for this process, whose stack may be higher than that of the text process.
        """
        lists = {name: list(lists) if nested else lists[0] for name, nested, lists in self.token_ids}
        try:
            return LargeBody(msgspec.msgpack.decode(self.values), lists)
        except RecursionError:
            raise too_deep() from None


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
        with FieldReader("TextRefused", fields) as read:
            return cls(
                job_id=read.integer("job_id"),
                message=read.text("message"),
                code=read.text("code", 64),
                param=read.optional_text("param", 256),
                status=read.integer("status", 400, 599),
            )

    def value(self) -> Any:
        """Raises what it says, as a RequestError."""
        raise RequestError(self.message, code=self.code, param=self.param, status=self.status)


ForTextProcess = EncodeText | EncodeChat | DecodeIds | ParseJson
FromTextProcess = TextReady | TokenIds | Text | TextRefused | Json
TextResult = TokenIds | Text | TextRefused | Json

_FOR_TEXT_PROCESS, _FROM_TEXT_PROCESS = kinds_of(ForTextProcess), kinds_of(FromTextProcess)


def decode_for_text_process(data: bytes, *further_fields: bytes) -> ForTextProcess:
    """A message from the frontend, with its last field if that came in a frame of its own; raises WireError."""
    return decode(  # type: ignore[no-any-return]
        data, _FOR_TEXT_PROCESS, "frontend -> text process", limit_bytes=4 * LIMIT, further_fields=further_fields
    )


def decode_from_text_process(data: bytes) -> FromTextProcess:
    """A message from a text process; raises WireError."""
    return decode(  # type: ignore[no-any-return]
        data, _FROM_TEXT_PROCESS, "text process -> frontend", limit_bytes=4 * LIMIT
    )


def job_id_of(data: bytes) -> int:
    """The number of a job whose message cannot be decoded; raises WireError if not even the number can be read."""
    return FieldReader("a job", unpack(data, limit_bytes=4 * LIMIT)[1]).integer("job_id")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"EncodeText.text: wanted UTF-8: {error}") from None


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"wanted a map, got {shown(value)}")
    return value


def _id_lists(value: Any) -> "tuple[str, bool, tuple[array[int], ...]]":
    with FieldReader("Json.token_ids", value) as read:
        entry = (read.text("name"), read.flag("nested"), read.entries("lists", _ids))
    if not (entry[1] or len(entry[2]) == 1):
        raise WireError(f"Json.token_ids: wanted one list, got {len(entry[2])}")
    return entry


def _name(value: Any) -> str:
    return FieldReader("ParseJson", [value]).text("id_fields", 64)


def _ids(value: Any) -> "array[int]":
    return FieldReader("Json.token_ids", [value]).numbers("lists", "i", LIMIT)


def _optional_maps(value: Any) -> tuple[dict[str, Any], ...] | None:
    return None if value is None else FieldReader("EncodeChat", [value]).entries("tools", _mapping)
