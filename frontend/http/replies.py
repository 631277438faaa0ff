"""The replies to completions: whole bodies, and the chunks of streams.

Nearly every chunk of a stream is a piece of text and nothing else. Such a chunk is put together from constant parts,
encoded once per stream, and the text. All others are dicts, encoded by msgspec.
"""

import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from frontend.chat.answer import AnswerForm, AnswerParser
from frontend.chat.parts import CallArguments, CallStart, Content, Message, Part, Reasoning
from frontend.events import Delta, Final, SampleResult, TokenLogprob, TopLogprob, Usage
from frontend.prompt_logprobs import in_turns

_encoder = msgspec.json.Encoder()


ShownToken = tuple[str, float | None, Any]
"""A token's share of the text, its log probability, and the likeliest ones by text; None where there is nothing."""


@dataclass(frozen=True)
class Echo:
    """The prompt as it stands before the output of a completion with `echo`.

    Attributes:
        text: the prompt's text.
        tokens: each of its tokens, with log probabilities if asked for (never for the first).
    """

    text: str
    tokens: tuple[ShownToken, ...]


NO_ECHO = Echo("", ())


def usage_dict(usages: Sequence[Usage], *, output_wanted: bool = True) -> dict[str, Any]:
    """Tokens of one or several requests, as the API reports them."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages) if output_wanted else 0
    cached = sum(usage.cached_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Reply(ABC):
    """The reply to one HTTP request; subclasses know the form of a choice.

    Args:
        reply_id: the `id` of body and chunks.
        model: the name for the client.
        logprob_count: likeliest tokens to show per position; None for no log probabilities.
        token_ids: whether token ids are shown.
    """

    kind = ""
    chunk_kind = ""

    def __init__(self, reply_id: str, model: str, *, logprob_count: int | None, token_ids: bool) -> None:
        self.logprob_count = logprob_count
        self.token_ids = token_ids
        self._head = {"id": reply_id, "created": int(time.time()), "model": model}
        self._start = b"data: " + _encoder.encode({**self._head, "object": self.chunk_kind})[:-1] + b',"choices":['
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage}

    @property
    def is_bare(self) -> bool:
        """Whether a token is shown as text only."""
        return self.logprob_count is None and not self.token_ids

    def text(self, index: int, text: str) -> bytes:
        """More text of choice `index`, and nothing else, as an event; empty if there is none."""
        return self._plain_chunk(index, text) if text else b""

    def chunk(self, index: int, delta: Delta, usage: dict[str, Any] | None = None) -> bytes:
        """A delta of choice `index` as an event; empty if there is nothing to show yet."""
        if not delta.finish_reason and self.is_bare and usage is None:
            return self.text(index, delta.text)
        return self.event(self.delta_choice(index, delta), usage)

    def event(self, choice: dict[str, Any] | None, usage: dict[str, Any] | None = None) -> bytes:
        """A chunk with one choice or none, and the usage if it is wanted."""
        body = {**self._head, "object": self.chunk_kind, "choices": [choice] if choice else []}
        if usage is not None:
            body["usage"] = usage
        return b"data: " + _encoder.encode(body) + b"\n\n"

    @abstractmethod
    def delta_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of a chunk."""

    @abstractmethod
    def _make_plain_parts(self, index: int) -> tuple[bytes, bytes]:
        """See `plain_parts`."""

    def plain_parts(self, index: int) -> tuple[bytes, bytes]:
        """The constant parts before and after the text, in an event of choice `index` that contains nothing else."""
        if index not in self._plain:
            self._plain[index] = self._make_plain_parts(index)
        return self._plain[index]

    def _plain_chunk(self, index: int, text: str) -> bytes:
        start, end = self.plain_parts(index)
        return start + _encoder.encode(text) + end


class ChatReply(Reply):
    """Replies of `/v1/chat/completions`."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    async def choice(self, sample: SampleResult, form: AnswerForm) -> dict[str, Any]:
        """One choice of a whole body."""
        message: dict[str, Any] = {"role": "assistant", "content": sample.text}
        if not form.is_plain:
            message |= _message_fields(form.message(sample.text), form)
        choice = {
            "index": sample.index,
            "message": message,
            "logprobs": await self._whole_logprobs(sample.logprobs),
            "finish_reason": _finish_reason(sample.finish_reason, bool(message.get("tool_calls"))),
            "stop_reason": sample.stop_reason,
        }
        return choice | ({"token_ids": list(sample.token_ids)} if self.token_ids else {})

    def role_chunk(self, index: int) -> bytes:
        """The first chunk of a choice."""
        delta = {"role": "assistant", "content": ""}
        return self.event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def answer_text(self, index: int, text: str, parser: AnswerParser) -> bytes:
        """More text of an answer that may hold more than content, as `answer_chunks` has it."""
        return self.answer_chunks(index, Delta(index, text, array("i")), parser)

    def answer_chunks(
        self, index: int, delta: Delta, parser: AnswerParser, usage: dict[str, Any] | None = None
    ) -> bytes:
        """A delta of an answer that may hold more than content, as events: one for each piece, one for the end.

        Log probabilities and token ids go with the first of them.
        """
        parts = parser.feed(delta.text) + (parser.finish() if delta.finish_reason else [])
        is_bare = self.is_bare and usage is None
        chunks, rest = [], delta
        for part in parts:
            if is_bare and isinstance(part, Content):
                chunks.append(self._plain_chunk(index, part.text))
                continue
            choice = {
                **self.delta_choice(index, replace(rest, text="", finish_reason=None)),
                "delta": _part_fields(part),
            }
            chunks.append(self.event(choice, usage))
            rest = replace(delta, token_ids=array("i"), logprobs=[])
        if delta.finish_reason or (not parts and not is_bare):
            reason = _finish_reason(delta.finish_reason, parser.has_calls)
            last = {**self.delta_choice(index, replace(rest, text="", finish_reason=reason)), "delta": {}}
            chunks.append(self.event(last, usage))
        return b"".join(chunks)

    def delta_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of a chunk."""
        choice = {
            "index": index,
            "delta": {"content": delta.text} if delta.text or not delta.finish_reason else {},
            "logprobs": self._logprobs(delta.logprobs) if delta.token_ids else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason:
            choice["stop_reason"] = delta.stop_reason
        return choice | ({"token_ids": list(delta.token_ids)} if self.token_ids else {})

    def _make_plain_parts(self, index: int) -> tuple[bytes, bytes]:
        start = self._start + b'{"index":%d,"delta":{"content":' % index
        return start, b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if self.logprob_count is None or entries is None:
            return None
        return {"content": [self._logprob(entry) for entry in entries]}

    async def _whole_logprobs(self, entries: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """The same for a whole output, which may be long."""
        if self.logprob_count is None or entries is None:
            return None
        return {"content": await in_turns(msgspec.Raw(_encoder.encode(self._logprob(entry))) for entry in entries)}

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        top = entry.top[: self.logprob_count]
        return {
            "token": entry.text,
            "logprob": entry.logprob,
            "bytes": list(entry.raw),
            "top_logprobs": [{"token": t.text, "logprob": t.logprob, "bytes": list(t.raw)} for t in top],
        }


class CompletionReply(Reply):
    """Replies of `/v1/completions`; keeps, per choice, how much text has been sent, for `text_offset`."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, reply_id: str, model: str, *, logprob_count: int | None, token_ids: bool) -> None:
        super().__init__(reply_id, model, logprob_count=logprob_count, token_ids=token_ids)
        self._offsets: dict[int, int] = {}

    async def choice(
        self, index: int, sample: SampleResult, echo: Echo, *, output_wanted: bool = True
    ) -> dict[str, Any]:
        """One choice of a whole body; without the output if only the echo is wanted."""
        tokens = list(echo.tokens)
        if output_wanted:
            tokens += await in_turns(self.shown(entry.text, entry) for entry in sample.logprobs or ())
        choice = {
            "index": index,
            "text": echo.text + (sample.text if output_wanted else ""),
            "logprobs": self._logprobs(index, tokens),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        return choice | ({"token_ids": list(sample.token_ids)} if self.token_ids else {})

    def echo_chunk(self, index: int, echo: Echo) -> bytes:
        """The chunk that holds the prompt."""
        logprobs = self._logprobs(index, list(echo.tokens))
        return self.event({"index": index, "text": echo.text, "logprobs": logprobs, "finish_reason": None})

    def delta_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of a chunk."""
        choice = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, [self.shown(entry.text, entry) for entry in delta.logprobs]),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason:
            choice["stop_reason"] = delta.stop_reason
        return choice | ({"token_ids": list(delta.token_ids)} if self.token_ids else {})

    def _make_plain_parts(self, index: int) -> tuple[bytes, bytes]:
        return self._start + b'{"index":%d,"text":' % index, b',"logprobs":null,"finish_reason":null}]}\n\n'

    def shown(self, text: str, entry: TokenLogprob | None) -> ShownToken:
        """A token as `logprobs` shows it; for an echo this is most of the work."""
        return (text, None, None) if entry is None else (text, entry.logprob, self._top(text, entry))

    def _logprobs(self, index: int, tokens: list[ShownToken]) -> dict[str, Any] | None:
        if self.logprob_count is None:
            return None
        offset = self._offsets.get(index, 0)
        offsets = []
        for text, _, _ in tokens:
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {
            "tokens": [text for text, _, _ in tokens],
            "token_logprobs": [logprob for _, logprob, _ in tokens],
            "top_logprobs": [top for _, _, top in tokens],
            "text_offset": offsets,
        }

    def _top(self, text: str, entry: TokenLogprob) -> msgspec.Raw:
        """Log probabilities by token; the chosen one under its share of the text, as `tokens` has it."""
        others = [t for t in reversed(entry.top[: self.logprob_count]) if t.token_id != entry.token_id]
        top = {**{_key(t.text, t.raw): t.logprob for t in others}, text: entry.logprob} if self.logprob_count else {}
        return msgspec.Raw(_encoder.encode(top))


def _key(text: str, raw: bytes) -> str:
    """A token's text, or its bytes if they are not whole characters: many such tokens would have the same text."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


def _finish_reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and has_calls else reason


def _message_fields(message: Message, form: AnswerForm) -> dict[str, Any]:
    """The fields of a message that is more than content."""
    fields: dict[str, Any] = {"content": message.content}
    if form.reasons:
        reasoning = message.reasoning or None if form.shows_reasoning else None
        fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if message.calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    return fields


def _part_fields(part: Part) -> dict[str, Any]:
    """The `delta` of a chunk with one piece."""
    match part:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def finals_usage(finals: Sequence[Final], *, output_wanted: bool = True) -> dict[str, Any]:
    """The usage of a reply over all its prompts."""
    return usage_dict([final.usage for final in finals], output_wanted=output_wanted)


async def prompt_fields(final: Final, reply: Reply, *, logprobs_wanted: bool = True) -> dict[str, Any]:
    """The prompt in a whole reply, in vLLM's form: its token ids, and their log probabilities by id."""
    fields: dict[str, Any] = {"prompt_token_ids": list(final.prompt_token_ids)} if reply.token_ids else {}
    if logprobs_wanted and final.prompt_logprobs is not None:
        fields["prompt_logprobs"] = await in_turns(entry and _by_token_id(entry) for entry in final.prompt_logprobs)
    return fields


def _by_token_id(entry: TokenLogprob) -> msgspec.Raw:
    own = TopLogprob(entry.token_id, entry.text, entry.raw, entry.logprob, entry.rank)
    by_token_id = {
        str(top.token_id): {"logprob": top.logprob, "rank": top.rank, "decoded_token": top.text}
        for top in (*entry.top, own)
    }
    return msgspec.Raw(_encoder.encode(by_token_id))
