"""The state of both clients: whether they are connected, and the replies that came, sorted by request.

No sockets and no waiting: `client.Client` and `async_client.AsyncClient` have those.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from common import client_messages as wire
from common.errors import AccessError, EngineDeadError, RequestError, TriremeError, WireError
from common.keys import ClientKeys
from common.sockets import connection_event

HELLO_ID = ""
"""Where replies go that name no request: Welcome, and errors about unreadable messages."""

AUTOMATIC_PREFIX = "auto:"
"""Begins the ids of requests that the caller gave none; his own should not begin with it."""

TIMEOUT_SLACK_S = 5.0
"""How much longer than a request's own timeout the client waits for its end."""

REFUSALS_LIMIT = 3
"""Handshakes that fail one after another before a client gives up; one may fail because the engine just ends."""

OwnKeys = str | os.PathLike[str] | Sequence[str] | None
"""A client's keys: the file with its secret key, or the pair (public, secret)."""
ServerKey = str | os.PathLike[str] | None
"""The engine's public key, or the file that holds it."""
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

    def take(self) -> Reply:
        """The oldest reply; the request's end stays, so that whoever asks again hears it again."""
        return self.replies.popleft() if isinstance(self.replies[0], wire.Delta) else self.replies[0]


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

    def end_all(self, error: EngineDeadError) -> None:
        """The connection is gone: every live request ends."""
        live, self._live = self._live, {}
        for inbox in live.values():
            inbox.put(error)


class Connection:
    """What a client's socket has told about its connection.

    Args:
        endpoint: the engine's.
        keys: the client's.

    Attributes:
        stands: messages get through.
        refusal: why there will be no connection, once that is clear.
    """

    def __init__(self, endpoint: str, keys: ClientKeys | None) -> None:
        self.stands = False
        self.refusal: AccessError | None = None
        self._endpoint = endpoint
        self._keys = keys
        self._failed_count = 0

    def note(self, event: Sequence[bytes]) -> bool:
        """Take one event of the socket's monitor; whether a connection that stood has ended with it."""
        number = connection_event(event)
        stood, self.stands = self.stands, number == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.stands:
            self._failed_count = 0
        elif number == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = AccessError(f"the engine at {self._endpoint} does not let this client in: {self._who()}")
        elif number != zmq.EVENT_DISCONNECTED:
            self._failed_count += 1
            final = number == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # ZeroMQ does not try again
            if final or self._failed_count >= REFUSALS_LIMIT:
                self.refusal = AccessError(f"the engine at {self._endpoint} does not take this client: {self._why()}")
        return stood and not self.stands

    def lost(self) -> EngineDeadError:
        """What the requests get that were live when the connection ended."""
        return EngineDeadError(f"the connection to the engine at {self._endpoint} is lost")

    def unreachable(self, timeout_s: float) -> EngineDeadError:
        """What a request gets that finds no connection."""
        return EngineDeadError(f"no engine can be reached at {self._endpoint} within {timeout_s:g} s")

    def _who(self) -> str:
        return f"its key {self._keys.own.public.decode()} is not authorised" if self._keys else "it has no keys"

    def _why(self) -> str:
        if self._keys is None:
            return "it wants keys (server_key, client_keys), or there is no engine"
        return "the engine's key is another one than server_key, or it takes no keys"


def deadline_after(timeout_s: float | None, now_s: float) -> float | None:
    """When a client gives up on a request with this timeout: a little after the engine should have ended it."""
    return None if timeout_s is None else now_s + timeout_s + TIMEOUT_SLACK_S


def raise_error(reply: Reply) -> None:
    """Raise what a reply says, if it says an error.

    Raises:
        RequestError: the engine refused or ended the request.
        AccessError: the client's key was revoked.
        EngineDeadError: the connection is gone.
    """
    if isinstance(reply, TriremeError):
        raise reply
    if isinstance(reply, wire.ErrorReply) and reply.code == "key_revoked":
        raise AccessError(reply.message)
    if isinstance(reply, wire.ErrorReply):
        raise RequestError(
            reply.message,
            code=reply.code,
            param=reply.param,
            status=reply.status,
            retry_after_ms=reply.retry_after_ms,
        )
