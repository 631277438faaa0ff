"""The output of `/v1/responses`: items (a message, a call, reasoning) that open, grow and close, with their events."""

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from frontend.chat.parts import CallArguments, CallStart, Content, Part, Reasoning
from frontend.events import Usage

CUT = ("length", "abort")
"""Reasons for which an output ends before it is complete."""

_encoder = msgspec.json.Encoder()


class ResponseHead:
    """The common part of all events of one response.

    Args:
        response_id: its `id`.
        model: the name for the client.
        echoed: the fields that are repeated from the request.
    """

    def __init__(self, response_id: str, model: str, echoed: dict[str, Any]) -> None:
        self.response_id = response_id
        self._fields = {
            "id": response_id, "object": "response", "created_at": int(time.time()), "model": model, **echoed
        }  # fmt: skip
        self._sequence_number = -1

    def whole(self, output: list[dict[str, Any]], reason: str | None, usage: Usage | None) -> dict[str, Any]:
        """The response so far; `reason` is why it ended, None while it goes on."""
        is_cut = reason in CUT
        status = "in_progress" if reason is None else "incomplete" if is_cut else "completed"
        return {
            **self._fields,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }

    def event(self, kind: str, **fields: Any) -> bytes:
        """One event of the stream."""
        self._sequence_number += 1
        body = {"type": kind, "sequence_number": self._sequence_number, **fields}
        return b"event: " + kind.encode() + b"\ndata: " + _encoder.encode(body) + b"\n\n"


class Items:
    """The output under construction: at most one item is open.

    Attributes:
        output: the items so far.
    """

    def __init__(self, head: ResponseHead) -> None:
        self.output: list[dict[str, Any]] = []
        self._head = head
        self._open: dict[str, Any] | None = None
        self._text = ""

    def take(self, parts: Iterable[Part]) -> bytes:
        """More of the answer; the events that tell of it."""
        events = b""
        for part in parts:
            match part:
                case Content(text):
                    events += self._grow("message", text)
                case Reasoning(text):
                    events += self._grow("reasoning", text)
                case CallStart(_, call_id, name):
                    events += self.close() + self._start(
                        {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                    )
                case CallArguments(_, text) if self._open is not None:
                    self._text += text
                    events += self._event("function_call_arguments.delta", delta=text)
        return events

    def close(self, reason: str | None = None) -> bytes:
        """Finish the open item; `reason` is why the output ended, if it did."""
        item, self._open = self._open, None
        if item is None:
            return b""
        text = self._text
        item["status"] = "incomplete" if reason in CUT else "completed"
        if item["type"] == "function_call":
            item["arguments"] = text
            events = self._event("function_call_arguments.done", item, arguments=text, name=item["name"])
        elif item["type"] == "reasoning":
            item["content"] = [{"type": "reasoning_text", "text": text}]
            events = self._event("reasoning_text.done", item, content_index=0, text=text)
        else:
            item["content"] = [_text_part(text)]
            events = self._event("output_text.done", item, content_index=0, text=text, logprobs=[])
            events += self._event("content_part.done", item, content_index=0, part=_text_part(text))
        return events + self._head.event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _grow(self, kind: str, text: str) -> bytes:
        """Text of the open item, if it is of that kind, or of a new one."""
        events = b""
        if self._open is None or self._open["type"] != kind:
            events = self.close()
            if kind == "message":
                events += self._start({"type": kind, "role": "assistant", "content": []})
                events += self._event("content_part.added", content_index=0, part=_text_part(""))
            else:
                events += self._start({"type": kind, "summary": [], "content": []})
        self._text += text
        if kind == "message":
            return events + self._event("output_text.delta", content_index=0, delta=text, logprobs=[])
        return events + self._event("reasoning_text.delta", content_index=0, delta=text)

    def _start(self, fields: dict[str, Any]) -> bytes:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[fields["type"]]
        item_id = f"{prefix}_{self._head.response_id}_{len(self.output)}"
        self._open, self._text = {"id": item_id, "status": "in_progress", **fields}, ""
        self.output.append(self._open)
        return self._head.event("response.output_item.added", output_index=len(self.output) - 1, item=self._open)

    def _event(self, kind: str, item: dict[str, Any] | None = None, **fields: Any) -> bytes:
        item = item or self._open
        assert item is not None, f"{kind} without an open item"
        place = {"item_id": item["id"], "output_index": len(self.output) - 1}
        return self._head.event(f"response.{kind}", **place, **fields)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
