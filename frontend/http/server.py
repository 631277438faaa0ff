"""Serves the application with uvicorn, on the socket that the supervisor bound."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator

import uvicorn

from common.config import EngineConfig, ServerOptions
from common.http_socket import BACKLOG, bind_http, http_url, inherited_http_socket
from frontend.engine import Engine
from frontend.http.app import build_app
from frontend.http.direct import StepWrites
from frontend.http.history import History
from frontend.http.protocol import Protocol
from frontend.http.tls import check_tls

KEEP_ALIVE_S = 75
ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts in one go: so many file descriptors are in use before their protocol knows."""
_START_POLL_S = 0.005


async def start(engine: Engine, config: EngineConfig) -> "HttpServer":
    """Answer HTTP requests from now on, in the running loop.

    Raises:
        ConfigError: the address cannot be had (only where no supervisor has bound it already), or a TLS file is none.
    """
    check_tls(config.server)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of every bad request
    server = HttpServer(engine, config.server, inherited_http_socket() or bind_http(config.server))
    await server.start()
    return server


class HttpServer:
    """The HTTP side of a frontend process.

    Args:
        engine: what serves the requests.
        options: keys, origins, TLS.
        listener: bound to the address.
    """

    def __init__(self, engine: Engine, options: ServerOptions, listener: socket.socket) -> None:
        self.endpoint = http_url(options, listener)
        self._listener = listener
        app = build_app(engine, options)
        step_writes = StepWrites()
        engine.core.after_tokens.append(step_writes.flush)
        self._history: History = app.state.history
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                loop="none",
                http=Protocol.of(engine.connections, step_writes),
                ws="none",
                server_header=False,
                backlog=ACCEPTED_AT_ONCE,
                timeout_keep_alive=KEEP_ALIVE_S,
                root_path=options.root_path,
                forwarded_allow_ips=_trusted_proxies(options),
                ssl_keyfile=options.ssl_keyfile or None,
                ssl_certfile=options.ssl_certfile or None,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to serve; returns once connections are taken."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")
        while not self._server.started:
            if self._task.done():
                await self._task
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(_START_POLL_S)
        self._listener.listen(BACKLOG)  # asyncio has set its own
        self._history.start()

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, close idle ones, and cut those that still read or write after `grace_s` seconds."""
        if self._task is None:
            return
        self._history.stop()
        self._server.should_exit = True
        await asyncio.wait({self._task}, timeout=grace_s)
        for connection in list(self._server.server_state.connections):  # their requests end as when a client goes
            connection.transport.abort()
        self._server.force_exit = True
        await self._task


def _trusted_proxies(options: ServerOptions) -> str:
    """Addresses whose `X-Forwarded-For` is believed; whoever opens the file of a Unix socket is a proxy of ours."""
    return "*" if options.uds else os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1,::1")


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the process's own handlers deal with them."""
        yield
