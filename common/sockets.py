"""The engine's ZeroMQ sockets: who binds, what waits, what is dropped.

Internal links are one-way PUSH/PULL pairs over ipc:// in the run directory; the receiver binds. They have no high-water
mark: run-ahead and admission control bound what is in flight. The client socket is a ROUTER with a bound on message
size and on what waits for one client. Every socket closes without lingering unless told otherwise.
"""

import contextlib
import errno
import os
import socket as unix
import struct
from collections.abc import Sequence
from pathlib import Path

import zmq

from common.config import PORT_LIMIT
from common.errors import StartupError
from common.file_locks import directory_lock
from common.keys import ClientKeys, KeyPair

NO_WAIT, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
"""Plain numbers for what is asked of sockets for each message: ZeroMQ's enums cost half a microsecond."""

CLIENT_MESSAGE_LIMIT_BYTES = 64 << 20
CLIENT_QUEUE_LIMIT = 2048
"""Messages that may wait for a client that does not read; one more, and its requests are aborted."""
CLIENT_BACKLOG_LIMIT = 128
"""Messages of one client that ZeroMQ takes in ahead of us; more wait at the client."""
CLIENT_HEARTBEAT_MS = 2000
CLIENT_HEARTBEAT_TIMEOUT_MS = 10_000
"""A client or engine whose machine or process stands still this long is taken for gone by the other."""
CLIENT_DOMAIN = b"clients"
"""The name that authentication requests about the client socket carry."""
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
SOCKET_LIMIT = 65_536
CONTEXT_FILES = 6
"""File descriptors of a context with one socket, and one more for what that connects or binds. ZeroMQ ends the whole
process when it gets some of them and not all."""
CLIENT_FILES = 9
"""Those of a client: two more sockets tell what becomes of its connection."""


def new_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """The process's ZeroMQ context.

    Raises:
        StartupError: this process has no room for more sockets.
    """
    try:
        _expect_room(CONTEXT_FILES)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    except OSError as error:
        raise StartupError(f"there is no room for ZeroMQ's sockets: {error.strerror}") from None
    context.set(zmq.MAX_SOCKETS, SOCKET_LIMIT)
    return context


def bind_pull(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    """The receiving end of an internal link."""
    return _internal(context, zmq.PULL, endpoint, bind=True)


def connect_push(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    """The sending end of an internal link; may connect before the other end binds."""
    return _internal(context, zmq.PUSH, endpoint, bind=False)


def bind_router(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str) -> "zmq.Socket[bytes]":
    """The supervisor's end of the control link."""
    return _internal(context, zmq.ROUTER, endpoint, bind=True)


def connect_dealer(context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, identity: str = "") -> "zmq.Socket[bytes]":
    """A child's end of the control link, known to the other side by `identity`."""
    return _internal(context, zmq.DEALER, endpoint, bind=False, identity=identity)


def bind_client_router(
    context: "zmq.Context[zmq.Socket[bytes]]",
    endpoint: str,
    keys: KeyPair | None = None,
    local_endpoint: str = "",
) -> "zmq.Socket[bytes]":
    """The socket that client programs connect to.

    Args:
        context: with keys, something answers ZeroMQ's authentication requests there.
        endpoint: where clients connect.
        keys: the engine's; only clients that know its public key and have an authorised one of their own get in.
        local_endpoint: with keys, an ipc endpoint for the user's own programs on this machine, which need none.

    Raises:
        StartupError: the endpoint cannot be bound; the message says which and why.
    """
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.MAXMSGSIZE, CLIENT_MESSAGE_LIMIT_BYTES)
    socket.set(zmq.SNDHWM, CLIENT_QUEUE_LIMIT)
    socket.set(zmq.RCVHWM, CLIENT_BACKLOG_LIMIT)
    socket.set(zmq.HEARTBEAT_IVL, CLIENT_HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, CLIENT_HEARTBEAT_TIMEOUT_MS)
    try:
        if keys:
            if local_endpoint:
                bind_client_endpoint(socket, local_endpoint)
            socket.set(zmq.CURVE_SECRETKEY, keys.secret)  # from here on: options count for later binds only
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.ZAP_DOMAIN, CLIENT_DOMAIN)
        bind_client_endpoint(socket, endpoint)
    except StartupError:
        socket.close()
        raise
    return socket


def bind_client_endpoint(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Bind a client socket; raises StartupError as `bind_client_router`."""
    folder = Path(endpoint.removeprefix("ipc://")).parent
    with directory_lock(folder) if endpoint.startswith("ipc://") else contextlib.nullcontext():
        if is_served(endpoint):  # ZeroMQ itself would take the file from whoever has it
            raise StartupError(f"cannot bind {endpoint}: another engine serves there")
        _bind(socket, endpoint)


def is_served(endpoint: str) -> bool:
    """Whether somebody listens at an ipc:// endpoint; False for others."""
    path = endpoint.removeprefix("ipc://")
    if path == endpoint or not Path(path).is_socket():
        return False
    with unix.socket(unix.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) in (0, errno.EAGAIN)  # EAGAIN: so many wait there already that we cannot


def is_refused(endpoint: str, timeout_s: float = 0.25) -> bool:
    """Whether nobody listens at an endpoint, and the system says so; False where nobody answers, or there is no such
    address. Waits for an answer over TCP, and for the address of a name.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        if endpoint.startswith("ipc://"):
            return not endpoint.startswith("ipc://@") and not is_served(endpoint)  # an abstract address has no file
        unix.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):
        pass
    return False


def connect_client(
    endpoint: str, keys: ClientKeys | None = None
) -> "tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes], zmq.Socket[bytes]]":
    """A context, in it a client program's socket, and the socket that tells what becomes of its connection
    (`connection_event`).

    What is sent while there is no connection waits for the next one, which may be to another engine: look at the events
    before sending.

    Raises:
        StartupError: not an endpoint, or this process has no room for more sockets.
    """
    port = endpoint.rpartition(":")[2]
    is_tcp = endpoint.startswith("tcp://") and port.isdecimal() and 0 < int(port) <= PORT_LIMIT
    if not is_tcp and not endpoint.startswith("ipc://"):
        raise StartupError(
            f"cannot connect to {endpoint!r}: wanted ipc://PATH or tcp://ADDRESS:PORT with a port from 1 to "
            f"{PORT_LIMIT}, such as tcp://127.0.0.1:5555"
        )
    context: zmq.Context[zmq.Socket[bytes]] | None = None
    try:
        _expect_room(CLIENT_FILES)
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.HEARTBEAT_IVL, CLIENT_HEARTBEAT_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, CLIENT_HEARTBEAT_TIMEOUT_MS)
        if keys:
            socket.set(zmq.CURVE_PUBLICKEY, keys.own.public)
            socket.set(zmq.CURVE_SECRETKEY, keys.own.secret)
            socket.set(zmq.CURVE_SERVERKEY, keys.server_public)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES)
        _allow_ipv6(socket, endpoint)
        socket.connect(endpoint)
    except (OSError, zmq.ZMQError) as error:
        if context is not None:
            context.destroy(linger=0)
        raise StartupError(f"cannot connect to {endpoint!r}: {_reason(error, endpoint)}") from None
    return context, socket, monitor


def connection_event(event: Sequence[bytes]) -> int:
    """Which event a monitor's message tells: one of `zmq.EVENT_*`."""
    number: int = struct.unpack_from("=H", event[0])[0]
    return number


def _internal(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str, *, bind: bool, identity: str = ""
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    if identity:
        socket.set(zmq.IDENTITY, identity.encode())
    if bind:
        try:
            _bind(socket, endpoint)
        except StartupError:
            socket.close()
            raise
    else:
        socket.connect(endpoint)
    return socket


def _expect_room(count: int) -> None:
    """Raise OSError where this process cannot open so many more files now."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for file in opened:
            os.close(file)


def _allow_ipv6(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    if endpoint.startswith("tcp://["):
        socket.set(zmq.IPV6, 1)


def _reason(error: OSError | zmq.ZMQError, endpoint: str) -> str:
    """What the system or ZeroMQ says, without the endpoint that the latter's Python binding repeats."""
    return str(error.strerror if isinstance(error, OSError) else error).removesuffix(f" (addr={endpoint!r})")


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    try:
        _allow_ipv6(socket, endpoint)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise StartupError(f"cannot bind {endpoint}: it is in use; choose another --client-endpoint") from None
        raise StartupError(f"cannot bind {endpoint}: {_reason(error, endpoint)}") from None
    if endpoint.startswith("ipc://"):
        path = Path(endpoint.removeprefix("ipc://"))
        if path.exists():
            os.chmod(path, 0o600)
