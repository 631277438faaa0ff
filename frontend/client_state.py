"""The state of both clients: whether they are connected, and the replies that came, sorted by request.

No sockets of its own and no waiting: `client.Client` and `async_client.AsyncClient` have those.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import zmq

from common import client_messages as wire
from common.errors import AccessError, EngineDeadError, RequestError, StartupError, TriremeError, WireError
from common.keys import ClientKeys
from common.run_dir import is_left_behind, may_return
from common.sockets import connection_event, is_refused
from frontend.client_resumption import FRUITLESS_LIMIT, Kept

HELLO_ID = ""
"""The inbox of replies that name no request: Welcome, and errors about unreadable messages."""
HELLO_PAUSE_S = 0.05
"""Until a new client says hello again to an engine that was still starting."""

AUTOMATIC_PREFIX = "auto:"
"""Start of the ids that are made up for requests without one; the caller's own ids should not start with it."""

TIMEOUT_SLACK_S = 5.0
"""How much longer than a request's own timeout the client waits for its end."""

REFUSALS_LIMIT = 3
"""Handshakes that fail in a row before a client gives up; a single one may fail because the engine is just ending."""

LOOK_S = 0.1
"""How often who waits for a connection looks whether there may still be one."""
GONE_S = 5.0
"""How long nobody listens where the engine was until its clients take it for gone; time for a service manager to start
another one in its place."""
PROBES = 10
"""How often a client asks in that time whether somebody listens, however many of its requests wait to know."""

OwnKeys = str | os.PathLike[str] | Sequence[str] | None
"""A client's keys: the file with its secret key, or the pair (public, secret)."""
ServerKey = str | os.PathLike[str] | None
"""The engine's public key, or the file that holds it."""
Reply = wire.Delta | wire.ToClient | TriremeError

logger = logging.getLogger(__name__)


class Inbox:
    """The replies to one request that have come and were not read yet.

    Attributes:
        kept: what is needed to ask for it again; None before it was sent.
        is_quiet: its reader wants the end alone.
    """

    __slots__ = ("is_quiet", "kept", "replies", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.replies: deque[Reply] = deque()
        self.kept: Kept | None = None
        self.is_quiet = False

    def put(self, reply: Reply) -> None:
        """Add a reply."""
        self.replies.append(reply)

    def take(self) -> Reply:
        """The oldest reply. The final one stays in the inbox, so that it can be asked for again."""
        return self.replies.popleft() if isinstance(self.replies[0], wire.Delta) else self.replies[0]


class OneThread:
    """Held by what uses the sockets: two threads at once would have ZeroMQ abort the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another thread is using this client; give each thread a client of its own")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class ClientState:
    """The live requests of one connection.

    Args:
        inbox_type: the class of a request's inbox.

    Attributes:
        engine: the engine's name for itself (`Welcome.engine`); empty for one that does not come back once it is lost,
            None before its first Welcome.
        is_resuming: the connection was lost, and requests wait until the same engine can be asked for them again.
    """

    def __init__(self, inbox_type: type[Inbox] = Inbox) -> None:
        self.engine: str | None = None
        self.is_resuming = False
        self._loss: TriremeError = EngineDeadError("the connection is lost")
        self._inbox_type = inbox_type
        self._live: dict[str, Inbox] = {}
        self._next_number = 0

    def open(self, request_id: str | None = None) -> Inbox:
        """An inbox for a new request's replies.

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
        """How many requests have not ended yet."""
        return len(self._live)

    @contextlib.contextmanager
    def freed_on_error(self, inbox: Inbox) -> Iterator[None]:
        """A context in which an error frees the request's id again."""
        try:
            yield
        except BaseException:
            self.forget(inbox)
            raise

    def forget(self, inbox: Inbox) -> None:
        """The engine has never heard of the inbox's request: its id is free again."""
        self._live.pop(inbox.request_id, None)

    def is_live(self, request_id: str) -> bool:
        """Whether the request has not ended yet."""
        return request_id in self._live

    def streamed(self, inbox: Inbox, message: wire.Generate) -> wire.Generate:
        """The message to send: from an engine that may be lost and come back, tokens are wanted on the way, to go on
        from there. (Log probabilities of the prompt would be lost with the first of them.)"""
        if not self.engine or message.stream or message.params.get("prompt_logprobs") is not None:
            return message
        inbox.is_quiet = True
        return dataclasses.replace(message, stream=True)

    def note_sent(self, inbox: Inbox, message: wire.FromClient) -> None:
        """The inbox's message has been sent."""
        inbox.kept = Kept(message, time.monotonic())

    def note_abort(self, request_id: str) -> None:
        """The request is aborted, now or as soon as it has been asked for again."""
        inbox = self._live.get(request_id)
        if inbox is not None and inbox.kept is not None:
            inbox.kept.is_aborted = True

    def take(self, data: bytes) -> Sequence[wire.FromClient]:
        """Put one message from the engine into its request's inbox; returns what is to be sent now."""
        try:
            message = wire.decode_to_client(data)
        except WireError as error:
            logger.error("dropped a message from the engine: %s", error)
            return ()
        if isinstance(message, wire.Deltas):
            for request_id, delta in message.entries:
                if inbox := self._live.get(request_id):
                    if self.engine and inbox.kept is not None:
                        inbox.kept.add(delta)
                    if not inbox.is_quiet:
                        inbox.put(delta)
            return ()
        if isinstance(message, wire.Pong) and not message.request_id:
            return ()  # the engine only checks that we are still connected
        if self.is_resuming and isinstance(message, wire.ErrorReply) and not message.request_id:
            self.give_up(EngineDeadError(f"{self._loss}, and it cannot be asked again: {message.message}"))
            return ()
        self._answer(message)
        return self._resumed(message) if isinstance(message, wire.Welcome) else ()

    def _answer(self, message: Any) -> None:
        """The end of a request."""
        inbox = self._live.pop(self._whose(message), None)
        if inbox is not None:
            if isinstance(message, wire.Final) and inbox.kept is not None:
                message = inbox.kept.completed(message)
            inbox.put(message)
        elif isinstance(message, wire.ErrorReply):
            logger.warning("the engine reports: %s", message.message)

    def _whose(self, message: Any) -> str:
        request_id: str = HELLO_ID if isinstance(message, wire.Welcome) else message.request_id
        if isinstance(message, wire.ErrorReply) and request_id not in self._live and len(self._live) == 1:
            return request_id or next(iter(self._live))  # about a message it cannot read: that of the one live request
        return request_id

    def end_all(self, error: EngineDeadError) -> None:
        """The client is closed: end every live request."""
        live, self._live = self._live, {}
        for inbox in live.values():
            inbox.put(error)

    # -- a lost connection ---------------------------------------------------------------------------------------------

    def lose(self, error: EngineDeadError) -> None:
        """The connection is gone: end what cannot be asked for again; the rest waits for the engine to come back."""
        self._loss, now_s = error, time.monotonic()
        for inbox, kept in self._sent():
            if not self.engine:
                self._end(inbox, error)
            elif not kept.note_loss(now_s):
                text = f"the engine was lost {FRUITLESS_LIMIT} times while it had this request"
                self._end(inbox, RequestError(text, code="engine_restarted", status=503))
        self.is_resuming = bool(self._sent())

    def give_up(self, error: TriremeError | None = None) -> None:
        """The engine does not come back: end what waits for it."""
        self.is_resuming = False
        for inbox, _ in self._sent():
            self._end(inbox, error or self._loss)

    def _resumed(self, welcome: wire.Welcome) -> list[wire.FromClient]:
        """There is an engine again: what to ask it for."""
        is_back, self.engine = self.is_resuming and welcome.engine == self.engine, welcome.engine
        if not is_back:
            if self.is_resuming:
                self.give_up()
            return []
        self.is_resuming = False
        now_s = time.monotonic()
        return [message for _, kept in self._sent() for message in kept.messages(now_s)]

    def _sent(self) -> list[tuple[Inbox, Kept]]:
        """The live requests but for those that still wait for a connection."""
        return [(inbox, inbox.kept) for inbox in self._live.values() if inbox.kept is not None]

    def _end(self, inbox: Inbox, error: TriremeError) -> None:
        del self._live[inbox.request_id]
        inbox.put(error)


class Connection:
    """The state of a client's connection, as its socket's monitor reports it.

    Args:
        endpoint: the engine's.
        keys: the client's.

    Attributes:
        is_up: messages get through.
        refusal: why there will be no connection, once that is certain, or none for now (`no_socket`).
    """

    def __init__(self, endpoint: str, keys: ClientKeys | None) -> None:
        self.is_up = False
        self.refusal: TriremeError | None = None
        self._endpoint = endpoint
        self._path = Path(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc://") else None
        self._keys = keys
        self._failed_count = 0
        self._refused_since_s: float | None = None
        self._next_probe_s = 0.0

    def note(self, event: Sequence[bytes]) -> bool:
        """Take one event of the socket's monitor; True if the connection was up and has ended."""
        number = connection_event(event)
        was_up, self.is_up = self.is_up, number == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self.is_up:
            self._failed_count, self._refused_since_s = 0, None
        elif number == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = AccessError(f"the engine at {self._endpoint} does not let this client in: {self._who()}")
        elif number != zmq.EVENT_DISCONNECTED:
            self._failed_count += 1
            final = number == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL  # ZeroMQ does not try again
            if final or self._failed_count >= REFUSALS_LIMIT:
                self.refusal = AccessError(f"the engine at {self._endpoint} does not take this client: {self._why()}")
        return was_up and not self.is_up

    def lost(self) -> EngineDeadError:
        """The error for requests that were live when the connection ended, and cannot be asked for again."""
        return EngineDeadError(f"the connection to the engine at {self._endpoint} is lost")

    def no_socket(self, error: StartupError) -> EngineDeadError:
        """The error for requests when, after a loss, no new socket can be made. It is the refusal until one can."""
        self.refusal = EngineDeadError(f"{self.lost()}, and no new socket can be made: {error}")
        return self.refusal

    def hopeless(self, engine: str | None) -> TriremeError | None:
        """The error for requests that wait for a connection, if they would wait in vain. May take a quarter of a second
        to find out, if there has been one.

        Args:
            engine: as `ClientState.engine`.
        """
        if self.refusal is not None:
            return self.refusal
        if engine is None:
            return self._ended()
        return EngineDeadError(f"{self.lost()}, and nobody serves there any more") if self._is_gone(engine) else None

    def _ended(self) -> EngineDeadError | None:
        """The error of a first connection to an engine that has ended. Anywhere but in its run directory another engine
        may be about to start."""
        if self.is_up or self._path is None or not is_left_behind(self._path) or not is_refused(self._endpoint):
            return None
        end = "was killed" if self._path.parent.exists() else "has ended"
        return EngineDeadError(f"no engine serves at {self._endpoint} any more: the one that did {end}")

    def unreachable(self, timeout_s: float) -> EngineDeadError:
        """The error for a request that finds no connection."""
        why = ": nobody listens there" if self._path is not None and is_refused(self._endpoint) else ""
        return EngineDeadError(f"no engine can be reached at {self._endpoint} within {timeout_s:g} s{why}")

    def _is_gone(self, engine: str) -> bool:
        if self.is_up:
            return False
        if self._path is not None and not may_return(self._path):
            return True
        if engine:
            return False  # it will be started again
        now_s, since_s = time.monotonic(), self._refused_since_s
        is_late = since_s is not None and now_s - since_s >= GONE_S
        if not is_late and now_s < self._next_probe_s:
            return False
        self._next_probe_s = now_s + GONE_S / PROBES
        is_refused_now = is_refused(self._endpoint)
        self._refused_since_s = (since_s or now_s) if is_refused_now else None
        return is_late and is_refused_now

    def _who(self) -> str:
        return f"its key {self._keys.own.public.decode()} is not authorised" if self._keys else "it has no keys"

    def _why(self) -> str:
        if self._keys is None:
            return "it wants keys (server_key, client_keys), or there is no engine"
        return "the engine's key is another one than server_key, or it takes no keys"


def says_hello_again(welcome: wire.Welcome, give_up_at_s: float, now_s: float) -> bool:
    """Whether a new client waits for the engine: it listens, but is still loading its model, and there is time left."""
    return welcome.state == "starting" and now_s < give_up_at_s


def deadline_after(timeout_s: float | None, now_s: float) -> float | None:
    """When a client stops waiting for a request with this timeout: a little after the engine should have ended it."""
    return None if timeout_s is None else now_s + timeout_s + TIMEOUT_SLACK_S


def raise_error(reply: Reply) -> None:
    """Raise the error that a reply reports, if it does.

    Raises:
        RequestError: the engine refused or ended the request.
        AccessError: the client's key was revoked.
        EngineDeadError: the connection is gone, or the engine says that it has lost a process.
    """
    if isinstance(reply, TriremeError):
        raise reply
    if isinstance(reply, wire.ErrorReply) and reply.code == "key_revoked":
        raise AccessError(reply.message)
    if isinstance(reply, wire.ErrorReply) and reply.code == "engine_dead":
        raise EngineDeadError(reply.message)
    if isinstance(reply, wire.ErrorReply):
        raise RequestError(
            reply.message,
            code=reply.code,
            param=reply.param,
            status=reply.status,
            retry_after_ms=reply.retry_after_ms,
        )
