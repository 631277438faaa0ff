"""The requests of both clients: messages for requests and calls, and batches of requests in rounds.

No sockets and no waiting: `client.Client` and `async_client.AsyncClient` have those, with the same signatures.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar

from common import client_messages as wire
from common.errors import RequestError
from common.sampling_params import SamplingParams
from common.sockets import CLIENT_MESSAGE_LIMIT_BYTES

BATCH_SAMPLES = 2048
"""Samples of one batch that are sent at a time: more than any engine runs at once, fewer than its queue holds."""

TOGETHER_BYTES = 1 << 14
"""Of messages that are sent at once: four thousand token ids keep an engine busy while more are being written."""
GROWTH = 2
"""A batch begins with a quarter of that and of FRAMES_LIMIT, then half: the engine has nothing to do until the
first come, and while it reads them, twice as many can be written."""

Params = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters: complete, or only some by name (the model's own defaults fill in the rest), or none."""
Messages = Sequence[Mapping[str, Any]]
"""A chat: each message with `role` and `content`."""

T = TypeVar("T")
R = TypeVar("R")
ReplyT = TypeVar("ReplyT", bound=wire.ToClient)


class RequestOptions(TypedDict, total=False):
    """The options of every request, besides prompt, parameters and `stream`.

    Attributes:
        request_id: the caller's own name for it, unique among the client's live requests. By default one that starts
            with `auto:`.
        priority: lower goes first; the default is 0.
        cache_salt: cached prefixes are shared only under the same salt.
        timeout_s: seconds after which the engine ends the request with an error.
        add_special_tokens: put BOS before the prompt as the tokenizer does; by default for texts, not for chats.
    """

    request_id: str | None
    priority: int
    cache_salt: str
    timeout_s: float | None
    add_special_tokens: bool | None


class ChatOptions(RequestOptions, total=False):
    """The options of a chat.

    Attributes:
        tools: JSON descriptions of functions, for the chat template.
        template_kwargs: further variables for the chat template.
        continue_final_message: continue the last message instead of answering it.
    """

    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool


class EmbedOptions(ChatOptions, total=False):
    """The options of a request for an embedding.

    Attributes:
        pooling: `last`, `mean` or `cls`; empty for the engine's default.
    """

    pooling: str


def generate_message(
    request_id: str, prompt: wire.Prompt, params: Params, *, stream: bool, options: ChatOptions
) -> wire.Generate:
    """The message for a request; `request_id` is the caller's, or the one made up for it.

    Raises:
        RequestError: parameters of the wrong kind.
        TypeError: an unknown option.
    """
    _check_known(options, ChatOptions.__optional_keys__)
    return wire.Generate(
        request_id=request_id,
        prompt=prompt,
        params=params.to_wire() if isinstance(params, SamplingParams) else _params_to_wire(params or {}),
        model_defaults=not isinstance(params, SamplingParams),
        stream=stream,
        priority=options.get("priority", 0),
        cache_salt=options.get("cache_salt", ""),
        timeout_ms=_timeout_ms(options),
        add_special_tokens=options.get("add_special_tokens"),
        chat=_chat_to_wire(options),
    )


def embed_message(request_id: str, prompt: wire.Prompt, options: EmbedOptions) -> wire.Embed:
    """The message for a request for an embedding; raises TypeError for an unknown option."""
    _check_known(options, EmbedOptions.__optional_keys__)
    return wire.Embed(
        request_id=request_id,
        prompt=prompt,
        pooling=options.get("pooling", ""),
        priority=options.get("priority", 0),
        cache_salt=options.get("cache_salt", ""),
        timeout_ms=_timeout_ms(options),
        add_special_tokens=options.get("add_special_tokens"),
        chat=_chat_to_wire(options),
    )


def chat_params(params: Params) -> Params:
    """A chat's parameters: an answer may fill the context unless a limit is named."""
    if params is None or isinstance(params, Mapping):
        return {"max_tokens": None, **(params or {})}
    return params


def encoded(message: wire.FromClient) -> bytes:
    """A message as bytes.

    Raises:
        RequestError: it contains what msgpack cannot encode: a set, a lone surrogate, an integer beyond 64 bits. Or it
            is too large: the engine would end the connection, and with it whatever else runs on it.
    """
    try:
        data = message.to_wire()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"this request cannot be sent: {error}") from None
    if len(data) > CLIENT_MESSAGE_LIMIT_BYTES:
        text = f"this request has {len(data):,} bytes; wanted at most {CLIENT_MESSAGE_LIMIT_BYTES:,}"
        raise RequestError(text, code="body_too_large", status=413)
    return data


def is_enough(messages: Sequence[bytes], sent_count: int) -> bool:
    """Whether these messages should not wait for more that could be sent with them.

    Args:
        messages: what has gathered.
        sent_count: how often messages of the same batch were sent before.
    """
    shift = max(0, GROWTH - sent_count)
    return len(messages) >= wire.FRAMES_LIMIT >> shift or sum(map(len, messages)) >= TOGETHER_BYTES >> shift


# -- calls: one message, one reply -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call(Generic[T, ReplyT]):
    """A call to the engine that is answered by one reply.

    Attributes:
        message: makes the message, given a request id.
        reply: the class of the reply.
        value: the caller's result, given the reply.
    """

    message: Callable[[str], wire.FromClient]
    reply: type[ReplyT]
    value: Callable[[ReplyT], T]


def hello(name: str) -> Call[wire.Welcome, wire.Welcome]:
    """Introduces the client; the reply says what the engine serves."""
    return Call(lambda _: wire.Hello(client_name=name), wire.Welcome, lambda reply: reply)


def tokenize(prompt: str | Messages, add_special_tokens: bool | None) -> Call[list[int], wire.TokenizeReply]:
    """The token ids of a text or a chat."""
    return Call(
        lambda request_id: wire.Tokenize(request_id, prompt, add_special_tokens),
        wire.TokenizeReply,
        lambda reply: list(reply.token_ids),
    )


def detokenize(token_ids: Sequence[int], skip_special_tokens: bool) -> Call[str, wire.DetokenizeReply]:
    """The text of token ids; raises RequestError for an id that int32 cannot hold."""
    ids = _as_ids(token_ids)
    return Call(
        lambda request_id: wire.Detokenize(request_id, ids, skip_special_tokens),
        wire.DetokenizeReply,
        lambda reply: reply.text,
    )


STATUS = Call(wire.GetStatus, wire.StatusReply, lambda reply: reply)
"""The engine's state, limits and figures."""
PING = Call(wire.Ping, wire.Pong, lambda _: None)
"""Whether the engine answers."""


# -- batches -----------------------------------------------------------------------------------------------------------


class Batch(Generic[R]):
    """Many requests that run together, in rounds: those that found the engine's queue full are sent again in the next.

    Args:
        prompts: texts, token ids or chats.
        params: one for all, or one for each.

    Attributes:
        finals: results so far, by index.
        window: how many requests may be under way at once.
    """

    def __init__(self, prompts: Sequence[wire.Prompt], params: Params | Sequence[Params]) -> None:
        self._prompts = prompts
        self._params = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(self._params) != len(prompts):
            raise ValueError(f"{len(self._params)} params for {len(prompts)} prompts")
        self.finals: dict[int, R] = {}
        self.window = _batch_window(self._params)
        self._refusal: RequestError | None = None

    def begin_round(self) -> list[tuple[int, wire.Prompt, Params]]:
        """Index, prompt and parameters of the requests that have no result yet."""
        self._refusal = None
        left = [index for index in range(len(self._prompts)) if index not in self.finals]
        return [(index, self._prompts[index], self._params[index]) for index in left]

    def refused(self, error: RequestError) -> None:
        """A request of this round ended with an error: remember that the queue is full, raise any other."""
        if error.code != "queue_full":
            raise error
        self._refusal = error

    def pause_s(self) -> float:
        """How long to wait before the next round; raises the refusal if no request at all has been served."""
        if self._refusal is None:
            return 0.0
        if not self.finals:
            raise self._refusal
        return (self._refusal.retry_after_ms or 0) / 1000

    def results(self) -> list[R]:
        """All results, in the order of the prompts."""
        return [self.finals[index] for index in range(len(self._prompts))]


def _batch_window(params: Sequence[Params]) -> int:
    counts = [each.n if isinstance(each, SamplingParams) else (each or {}).get("n", 1) for each in params]
    greatest = max((count for count in counts if isinstance(count, int)), default=1)
    return max(1, BATCH_SAMPLES // max(1, greatest))


def _check_known(options: RequestOptions, known: frozenset[str]) -> None:
    if unknown := options.keys() - known:
        raise TypeError(f"unknown option {min(unknown)!r}; known are {', '.join(sorted(known))}")


def _timeout_ms(options: RequestOptions) -> int | None:
    timeout_s = options.get("timeout_s")
    return None if timeout_s is None else max(1, round(timeout_s * 1000))


def _params_to_wire(params: Mapping[str, Any]) -> dict[str, Any]:
    """Some parameters by name; `logit_bias` as pairs, since the wire has no map with integer keys."""
    if not isinstance(params, Mapping):
        raise RequestError(f"params: wanted SamplingParams or a map, got {type(params).__name__}", param="params")
    plain = dict(params)
    if isinstance(bias := plain.get("logit_bias"), Mapping):
        plain["logit_bias"] = [[token_id, value] for token_id, value in bias.items()]
    return plain


def _chat_to_wire(options: ChatOptions) -> dict[str, Any]:
    """The options of a chat that differ from the defaults."""
    chat: dict[str, Any] = {}
    if tools := options.get("tools"):
        chat["tools"] = [dict(tool) for tool in tools]
    if template_kwargs := options.get("template_kwargs"):
        chat["template_kwargs"] = dict(template_kwargs)
    if options.get("continue_final_message"):
        chat["continue_final_message"] = True
    return chat


def _as_ids(token_ids: Sequence[int]) -> "array[int]":
    try:
        return array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError(f"token ids: {error}", param="token_ids") from None
