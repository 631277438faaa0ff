"""The content of `/v1/messages`: blocks (text, tool use, thinking) that open, grow and close, with their events."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from frontend.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from frontend.events import Usage

_encoder = msgspec.json.Encoder()


class Blocks:
    """Content under construction: at most one block is open.

    Attributes:
        content: the blocks so far.
    """

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._is_open = False
        self._arguments = ""

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event of the stream."""
        return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode({"type": kind, **fields}) + b"\n\n"

    def take(self, parts: Iterable[Part]) -> bytes:
        """More of the answer; the events that tell of it."""
        events = b""
        for part in parts:
            match part:
                case Content(text):
                    events += self._open_for({"type": "text", "text": ""})
                    self.content[-1]["text"] += text
                    events += self._delta({"type": "text_delta", "text": text})
                case Reasoning(text):
                    events += self._open_for({"type": "thinking", "thinking": "", "signature": ""})
                    self.content[-1]["thinking"] += text
                    events += self._delta({"type": "thinking_delta", "thinking": text})
                case CallStart(_, call_id, name):
                    events += self.close()
                    events += self._open_for({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    self._arguments += text
                    events += self._delta({"type": "input_json_delta", "partial_json": text})
        return events

    def close(self) -> bytes:
        """Finish the open block."""
        if not self._is_open:
            return b""
        self._is_open = False
        block = self.content[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        return self.event("content_block_stop", index=len(self.content) - 1)

    def _open_for(self, block: dict[str, Any]) -> bytes:
        if self._is_open and self.content[-1]["type"] == block["type"]:
            return b""
        events = self.close()
        self.content.append(block)
        self._is_open, self._arguments = True, ""
        return events + self.event("content_block_start", index=len(self.content) - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return self.event("content_block_delta", index=len(self.content) - 1, delta=delta)


def message_body(
    message_id: str, model: str, content: Sequence[dict[str, Any]], stop: dict[str, Any], usage: Usage
) -> dict[str, Any]:
    """A whole message, or what a stream starts with."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(content),
        **stop,
        "usage": {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        },
    }


def stop_fields(reason: str | None, stop: str | int | None, *, has_calls: bool) -> dict[str, Any]:
    """Why a message ended, in Anthropic's words; nothing while it goes on."""
    if reason == "stop":
        at_text = isinstance(stop, str)
        why = "tool_use" if has_calls else "stop_sequence" if at_text else "end_turn"
        return {"stop_reason": why, "stop_sequence": stop if at_text and not has_calls else None}
    return {"stop_reason": None if reason is None else "max_tokens", "stop_sequence": None}


def _object(text: str) -> Any:
    """A call's input as an object; input that was cut off, and so is not one, under a name of its own."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"incomplete_json": text}
