"""What the two clients share: requests to send, replies sorted by request, ends of all kinds.

No sockets and no waiting: `client.Client` and `async_client.AsyncClient` bring those.
"""

import contextlib
import logging
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common import client_messages as wire
from common.errors import EngineDeadError, RequestError, TriremeError, WireError
from common.sampling_params import SamplingParams

HELLO_ID = ""
"""Where replies go that name no request: Welcome, and errors about unreadable messages."""

AUTOMATIC_PREFIX = "auto:"
"""Begins the ids of requests that the caller gave none; his own should not begin with it."""

TIMEOUT_SLACK_S = 5.0
"""How much longer than a request's own timeout the client waits for its end."""

BATCH_SAMPLES = 2048
"""Samples of one batch that are under way at once: more than any engine runs, fewer than its queue takes."""

Params = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters: complete, or only some by name (the model's own defaults fill in the rest), or none."""
Reply = wire.Delta | wire.ToClient | TriremeError

logger = logging.getLogger(__name__)


class Inbox:
    """What has come for one request and was not read yet."""

    __slots__ = ("replies", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.replies: deque[Reply] = deque()

    def put(self, reply: Reply) -> None:
        """Add a reply."""
        self.replies.append(reply)


class ClientState:
    """The live requests of one connection.

    Args:
        inbox_type: made for each request.
    """

    def __init__(self, inbox_type: type[Inbox] = Inbox) -> None:
        self._inbox_type = inbox_type
        self._live: dict[str, Inbox] = {}
        self._next_number = 0

    def open(self, request_id: str | None = None) -> Inbox:
        """A place for a new request's replies.

        Raises:
            RequestError: the id is in use, or too long.
        """
        if request_id is None:
            self._next_number += 1
            request_id = f"{AUTOMATIC_PREFIX}{self._next_number}"
        if not isinstance(request_id, str) or len(request_id) > wire.ID_LIMIT:
            raise RequestError(f"request_id: wanted a string of at most {wire.ID_LIMIT} characters", param="request_id")
        if request_id in self._live:
            raise RequestError(f"request id {request_id!r} is in use", code="duplicate_request_id")
        inbox = self._live[request_id] = self._inbox_type(request_id)
        return inbox

    @property
    def live_count(self) -> int:
        """Requests whose end has not come yet."""
        return len(self._live)

    @contextlib.contextmanager
    def freed_on_error(self, inbox: Inbox) -> Iterator[None]:
        """What fails in here leaves the request's id free again."""
        try:
            yield
        except BaseException:
            self._live.pop(inbox.request_id, None)
            raise

    def is_live(self, request_id: str) -> bool:
        """Whether the request's end has not come yet."""
        return request_id in self._live

    def take(self, data: bytes) -> None:
        """Sort one message from the engine."""
        try:
            message = wire.decode_to_client(data)
        except WireError as error:
            logger.error("dropped a message from the engine: %s", error)
            return
        if isinstance(message, wire.Deltas):
            for request_id, delta in message.entries:
                if inbox := self._live.get(request_id):
                    inbox.put(delta)
            return
        if isinstance(message, wire.Pong) and not message.request_id:
            return  # the engine only looks whether we are there
        inbox = self._live.pop(self._whose(message), None)
        if inbox is not None:
            inbox.put(message)
        elif isinstance(message, wire.ErrorReply):
            logger.warning("the engine reports: %s", message.message)

    def _whose(self, message: Any) -> str:
        request_id: str = HELLO_ID if isinstance(message, wire.Welcome) else message.request_id
        if isinstance(message, wire.ErrorReply) and request_id not in self._live and len(self._live) == 1:
            return request_id or next(iter(self._live))  # the engine could not read a message: ours, there is no other
        return request_id

    def lost(self, why: str) -> None:
        """The connection is gone: every live request ends."""
        live, self._live = self._live, {}
        for inbox in live.values():
            inbox.put(EngineDeadError(why))


def encoded(message: wire.FromClient) -> bytes:
    """A message as bytes.

    Raises:
        RequestError: it holds what the wire cannot carry: a set, a lone surrogate, an integer beyond 64 bits.
    """
    try:
        return message.to_wire()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RequestError(f"this request cannot be sent: {error}") from None


def raise_error(reply: Reply) -> None:
    """Raise what a reply says, if it says an error.

    Raises:
        RequestError: the engine refused or ended the request.
        EngineDeadError: the connection is gone.
    """
    if isinstance(reply, TriremeError):
        raise reply
    if isinstance(reply, wire.ErrorReply):
        raise RequestError(
            reply.message,
            code=reply.code,
            param=reply.param,
            status=reply.status,
            retry_after_ms=reply.retry_after_ms,
        )


def generate_message(
    request_id: str,
    prompt: wire.Prompt,
    params: Params,
    *,
    stream: bool,
    priority: int = 0,
    cache_salt: str = "",
    timeout_s: float | None = None,
    add_special_tokens: bool | None = None,
    chat: Mapping[str, Any] | None = None,
) -> wire.Generate:
    """A request as a message; raises RequestError for parameters of the wrong kind."""
    complete = isinstance(params, SamplingParams)
    return wire.Generate(
        request_id=request_id,
        prompt=prompt,
        params=params.to_wire() if isinstance(params, SamplingParams) else _params_to_wire(params or {}),
        model_defaults=not complete,
        stream=stream,
        priority=priority,
        cache_salt=cache_salt,
        timeout_ms=None if timeout_s is None else max(1, round(timeout_s * 1000)),
        add_special_tokens=add_special_tokens,
        chat=chat or {},
    )


def embed_message(
    request_id: str,
    prompt: wire.Prompt,
    *,
    pooling: str = "",
    timeout_s: float | None = None,
    chat: Mapping[str, Any] | None = None,
    **options: Any,
) -> wire.Embed:
    """A request for an embedding as a message; `options` as `wire.Embed` has them."""
    timeout_ms = None if timeout_s is None else max(1, round(timeout_s * 1000))
    return wire.Embed(
        request_id=request_id, prompt=prompt, pooling=pooling, timeout_ms=timeout_ms, chat=chat or {}, **options
    )


def _params_to_wire(params: Mapping[str, Any]) -> dict[str, Any]:
    """Some parameters by name; `logit_bias` as pairs, since the wire has no map with integer keys."""
    if not isinstance(params, Mapping):
        raise RequestError(f"params: wanted SamplingParams or a map, got {type(params).__name__}", param="params")
    plain = dict(params)
    if isinstance(bias := plain.get("logit_bias"), Mapping):
        plain["logit_bias"] = [[token_id, value] for token_id, value in bias.items()]
    return plain


def deadline_after(timeout_s: float | None, now_s: float) -> float | None:
    """When a client gives up on a request with this timeout: a little after the engine should have ended it."""
    return None if timeout_s is None else now_s + timeout_s + TIMEOUT_SLACK_S


def chat_params(params: Params) -> Params:
    """A chat's parameters: an answer may fill the context unless a limit is named."""
    if params is None or isinstance(params, Mapping):
        return {"max_tokens": None, **(params or {})}
    return params


def batch_window(params: Sequence[Params]) -> int:
    """How many requests of a batch may be under way at once."""
    counts = [each.n if isinstance(each, SamplingParams) else (each or {}).get("n", 1) for each in params]
    greatest = max((count for count in counts if isinstance(count, int)), default=1)
    return max(1, BATCH_SAMPLES // max(1, greatest))


def chat_options(
    tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any] | None, continue_final_message: bool
) -> dict[str, Any]:
    """The options of a chat that differ from the defaults."""
    options: dict[str, Any] = {}
    if tools:
        options["tools"] = [dict(tool) for tool in tools]
    if template_kwargs:
        options["template_kwargs"] = dict(template_kwargs)
    if continue_final_message:
        options["continue_final_message"] = True
    return options


def as_ids(token_ids: Sequence[int]) -> "array[int]":
    """Token ids as int32.

    Raises:
        RequestError: an id that int32 cannot hold, or no integer.
    """
    try:
        return array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError(f"token ids: {error}", param="token_ids") from None
