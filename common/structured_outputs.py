"""Structured outputs: one definition and one validation of the form that an output must have.

Names are vLLM's. Whether a schema, a pattern or a grammar is itself valid is found out by the scheduler, which compiles
it before the request runs. A field of `SamplingParams`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from common.errors import RequestError

TEXT_LIMIT = 1 << 20
CHOICE_LIMIT = 4096
WHITESPACE = r"[ \n\r\t]{0,64}"
"""Between the tokens of a JSON text; bounded, so that no model fills its output with it."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The form that an output must have; exactly one of the fields is given.

    Attributes:
        json: a JSON schema, as a map or as JSON text; kept as text.
        regex: a regular expression that the whole output matches (Rust's syntax, anchored).
        choice: the output is one of these strings.
        grammar: a Lark or GBNF grammar.
        json_object: any JSON object.

    Raises:
        RequestError: none or several are given, or one is of the wrong type or too long.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [item.name for item in fields(self) if getattr(self, item.name) not in (None, False)]
        if len(given) != 1:
            wanted = ", ".join(item.name for item in fields(self))
            raise _wrong(f"wanted exactly one of {wanted}; got {', '.join(given) or 'none'}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        kind, text = self.key
        if not isinstance(text, str) or not 0 < len(text) <= TEXT_LIMIT:
            raise _wrong(f"{kind}: wanted a text of 1 to {TEXT_LIMIT} characters")

    @property
    def key(self) -> tuple[str, str]:
        """Which form, and its text: equal for equal demands. A `json_object` is a schema, a `choice` a JSON list."""
        if self.json_object:
            return "json", '{"type":"object"}'
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        kind = next(name for name in ("json", "regex", "grammar") if getattr(self, name) is not None)
        return kind, getattr(self, kind)

    def to_wire(self) -> dict[str, Any]:
        """A map with the one field that is given, for msgpack."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in given.items() if v not in (None, False)}

    @classmethod
    def from_any(cls, value: Any) -> "StructuredOutputs":
        """Build from a map as clients send it, or pass an object through.

        Raises:
            RequestError: an unknown name, or a value that is refused.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _wrong(f"wanted a map, got {type(value).__name__}")
        unknown = [str(name) for name in value if name not in cls.__dataclass_fields__]
        if unknown:
            raise _wrong(f"unknown field {unknown[0]!r:.80}")
        return cls(**value)


def _schema_text(schema: Any) -> str:
    if isinstance(schema, str) and len(schema) > TEXT_LIMIT:
        raise _wrong(f"json: wanted a text of 1 to {TEXT_LIMIT} characters")
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as error:
        raise _wrong(f"json: not a JSON schema: {error}") from None
    if not isinstance(value, dict | bool):
        raise _wrong(f"json: a JSON schema is an object; got {type(value).__name__}")
    return text


def _choices(choices: Any) -> tuple[str, ...]:
    if not isinstance(choices, list | tuple) or not 0 < len(choices) <= CHOICE_LIMIT:
        raise _wrong(f"choice: wanted a list of 1 to {CHOICE_LIMIT} strings")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise _wrong("choice: wanted strings that are not empty")
    return tuple(choices)


def _wrong(text: str) -> RequestError:
    return RequestError(f"structured_outputs: {text}", param="structured_outputs")
