"""The listening socket of the HTTP API: bound by the supervisor, inherited and served by the frontend.

So a port in use is noticed before anything starts, the number chosen for port 0 is known at once, and nobody can take
the port in between. The socket listens from the start, because two sockets that are only bound (with SO_REUSEADDR) can
have the same port; connections that come before the frontend serves wait for it.
"""

import errno
import os
import socket
from pathlib import Path

from common.config import ServerOptions
from common.errors import ConfigError, StartupError
from common.file_locks import directory_lock

HTTP_SOCKET_VARIABLE = "TRIREME_HTTP_SOCKET"
"""Environment variable with the number of the inherited socket."""
BACKLOG = 2048
"""Connections that may wait to be accepted."""


def bind_http(server: ServerOptions) -> socket.socket:
    """Bind and listen on the address that HTTP is served on.

    Raises:
        ConfigError: the address is in use or cannot be had; the message says what to do.
        StartupError: the directory of a Unix socket is locked by another program.
    """
    if server.uds:
        return _bind_unix(server.uds)
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"--host {server.host}: {error.strerror}") from None
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port {server.port} on {server.host} is in use: choose another, or --port 0 for any free one"
            ) from None
        raise ConfigError(f"cannot serve HTTP on {server.host} port {server.port}: {error.strerror}") from None
    return listener


def _bind_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        with directory_lock(Path(path).parent):
            if Path(path).is_socket() and listener.connect_ex(path) != 0:
                os.unlink(path)  # left by a process that is gone
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(BACKLOG)
    except StartupError:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--uds {path} is in use, or is another kind of file: choose another path, or remove the file"
            ) from None
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    return listener


def file_identity(path: str) -> tuple[int, int]:
    """What tells a file from another one of the same name; zeros if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def remove_own(path: str, identity: tuple[int, int]) -> None:
    """Remove a file if it is still the one that had this identity, and not another engine's."""
    if any(identity) and file_identity(path) == identity:
        Path(path).unlink(missing_ok=True)


def http_url(server: ServerOptions, listener: socket.socket) -> str:
    """How a client on this machine reaches a bound socket."""
    if server.uds:
        return f"http+unix://{server.uds}"
    scheme = "https" if server.ssl_certfile else "http"
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def inherited_http_socket() -> socket.socket | None:
    """The socket that the supervisor bound for HTTP; None if this process was started without one."""
    number = os.environ.get(HTTP_SOCKET_VARIABLE, "")
    return socket.socket(fileno=int(number)) if number else None
