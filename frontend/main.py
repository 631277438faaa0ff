"""The frontend process: its sockets, its event loop, its start and its end.

Sockets: connects `requests` (PUSH, to the scheduler), binds `outputs` (PULL, from the scheduler) and the client
endpoint (ROUTER); the HTTP API, unless switched off, has its own. Orders come over the supervisor link.

Start: the tokenizer and the client socket first, so that a bad folder or an endpoint in use is noticed at once; HTTP
answers 503 until the scheduler says that the engine is ready. Stop: refuse new requests, let the running ones finish
within the grace period, end the rest with an error. If a peer has failed, or a message of the scheduler's is lost
because it cannot be read or memory is short: every request ends with an error, then exit code 1. If a peer is started
again (`--restart`): open the new session's sockets to the scheduler, and let the requests wait until it is ready.
"""

import asyncio
import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq

from common import busy_poll
from common.child import SupervisorLink
from common.config import EngineConfig
from common.errors import ConfigError, StartupError, WireError, first_line
from common.messages import EngineReady, NewSession, PeerFailed, Profile, Stop, TokensOut, decode_for_frontend
from common.profiling import StepTraces
from common.recording import Link, recorder_for, sending
from common.sockets import MORE, NO_WAIT, bind_client_router, bind_pull, connect_push, new_context
from frontend.busy_loop import BusyLoop
from frontend.client_access import ClientAccess
from frontend.client_server import ClientServer
from frontend.engine import Engine
from frontend.tokenizer import Tokenizer
from frontend.zmq_reader import ZmqReader

LAST_WORDS_S = 0.3
"""How long the HTTP API gets to write the last errors to its clients."""
DEAD_S = 0.6
"""How long `/health` goes on to say that the engine is dead, for whoever asks in between."""

DEADLINE_LOOK_S = 0.1
"""How often to look for requests whose deadline has passed, while there is no scheduler to do it."""


logger = logging.getLogger(__name__)


class HttpServer(Protocol):
    """What `frontend.http.server.start` returns."""

    @property
    def endpoint(self) -> str:
        """The URL it answers at."""

    async def stop(self, grace_s: float) -> None:
        """Close the connections, those still writing after `grace_s` seconds too."""


def main(config: EngineConfig, link: SupervisorLink, rank: int = 0) -> int:
    """Run the frontend; returns the exit code."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.run(_run(config, link))
    return asyncio.run(_run(config, link))


async def _run(config: EngineConfig, link: SupervisorLink) -> int:
    return await Frontend(config, link, on_ready=_spare_the_collector).run()


def _spare_the_collector() -> None:
    """Exclude all objects that exist by now from garbage collection, which would stop every stream for 70 ms."""
    gc.freeze()


class Frontend:
    """The process's parts, and how they start and stop.

    Args:
        config: the configuration.
        link: to the supervisor.
        on_ready: called once we serve.
    """

    def __init__(self, config: EngineConfig, link: SupervisorLink, on_ready: Callable[[], None] = lambda: None) -> None:
        self._on_ready = on_ready
        self._config = config
        self._link = link
        self._context = new_context()
        self._busy = BusyLoop(busy_poll.of_engine(config, self._context))
        self._http: HttpServer | None = None
        self._started = self._failed = False
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._is_over = asyncio.Event()  # requests that go on are not waited for any more
        self._connect_scheduler(config.session)
        self._access = ClientAccess(self._context, Path(folder)) if (folder := config.server.client_keys) else None
        router = self._bind_clients()
        self._client_endpoint = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        started_s = time.monotonic()
        tokenizer = Tokenizer.load(config.tokenizer_dir or config.model_dir, config.model.chat_template)
        self._tokenizer_ms = (time.monotonic() - started_s) * 1000
        self._recorder = recorder_for(config, "frontend")
        send = sending(self._recorder, Link.REQUESTS, self._send_to_scheduler)
        self._engine = Engine(config, tokenizer, send, self._recorder)
        self._engine.order_profile = link.profile
        self._engine.core.later = asyncio.get_running_loop().call_soon
        self._traces: StepTraces | None = None
        self._next_deadline_look: asyncio.TimerHandle | None = None
        self._clients = ClientServer(self._engine, router, self._access)
        self._outputs_reader = self._read_outputs()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        loop.add_reader(link.wake_fd, self._on_orders)

    async def run(self) -> int:
        """Serve until told to stop; returns the exit code."""
        if self._config.server.http:
            from frontend.http import server

            self._http = await server.start(self._engine, self._config)
        self._started = True
        self._announce()
        threading.Thread(target=_warm_up, args=(self._engine.tokenizer,), name="warm-up", daemon=True).start()
        if code := await self._ended:
            await asyncio.sleep(DEAD_S)
        await self._finish()
        return 1 if self._failed else code

    def _connect_scheduler(self, session: int) -> None:
        self._requests = connect_push(self._context, self._config.endpoint("requests", session))
        self._outputs = bind_pull(self._context, self._config.endpoint("outputs", session))

    def _read_outputs(self) -> ZmqReader:
        return ZmqReader(self._outputs, self._on_output, self._clients.flush, one_frame=True)

    def _bind_clients(self) -> "zmq.Socket[bytes]":
        local = self._config.endpoint("client", 0)
        endpoint = self._config.server.client_endpoint or local
        keys = self._access.server_keys if self._access is not None else None
        try:
            return bind_client_router(self._context, endpoint, keys, local)
        except StartupError as error:
            if self._config.session:  # it was ours before: another attempt may succeed
                raise
            raise ConfigError(f"--client-endpoint: {error}") from None

    def _send_to_scheduler(self, data: bytes, more: bool = False) -> None:
        # Frames of one message: the scheduler cannot see the first without the others. No high-water mark: never waits.
        self._requests.send(data, MORE if more else NO_WAIT)
        self._busy.note()

    def _on_output(self, data: bytes) -> None:
        self._link.progress += 1
        if self._recorder is not None:
            self._recorder.received(Link.OUTPUTS, data)
        try:
            message = decode_for_frontend(data)
            self._engine.core.handle(message)
        except WireError as error:
            return self._fail_ourselves(f"a message of the scheduler cannot be read: {error}")
        except BaseException as error:
            logger.exception("a message of the scheduler was lost")
            return self._fail_ourselves(first_line(error))
        if isinstance(message, TokensOut):
            self._busy.note()
            if self._traces is not None:
                self._traces.step()
        elif isinstance(message, EngineReady):
            self._announce()

    def _announce(self) -> None:
        """Tell the supervisor that we serve, once both the engine and our own sockets are ready for the first time."""
        ready = self._engine.limits
        if ready is None or not self._started or self._traces is not None:
            return
        where = f"client socket {self._client_endpoint}"
        if self._http is not None:
            where += f", HTTP {self._http.endpoint}"
        self._link.ready(f"{where}; tokenizer {self._tokenizer_ms:.0f} ms; max_model_len {ready.max_model_len}")
        self._traces = StepTraces("frontend", self._config.profiling, self._link)
        self._on_ready()

    # -- end -----------------------------------------------------------------------------------------------------------

    def _on_orders(self) -> None:
        for order in self._link.take_orders():
            match order:
                case Stop():
                    self._stop(order.grace_ms / 1000)
                case Profile():
                    if self._traces is not None:
                        self._traces.order(order)
                case PeerFailed():
                    self._fail(order.message)
                case NewSession():
                    self._begin_session(order)

    def _stop(self, grace_s: float) -> None:
        """Refuse requests, and wait so long for those in flight; a later order may leave them less."""
        logger.info("stopping; requests in flight: %d", self._engine.core.live_count)
        self._engine.core.drain()
        asyncio.get_running_loop().call_later(grace_s, self._is_over.set)
        self._end(0)

    def _begin_session(self, order: NewSession) -> None:
        """Scheduler and worker are restarted: stop listening to the old ones."""
        core = self._engine.core
        logger.warning("%s; requests that wait until it is back: %d", order.message, core.live_count)
        core.suspend(order.message, order.session)
        self._end_overdue()
        self._outputs_reader.close()
        self._outputs.close(linger=0)
        self._requests.close(linger=0)
        try:
            self._connect_scheduler(order.session)
        except (StartupError, zmq.ZMQError) as error:  # we would wait for ever for a scheduler that has nobody to tell
            return self._fail_ourselves(str(error))
        self._outputs_reader = self._read_outputs()

    def _end_overdue(self) -> None:
        """End overdue requests, again and again until there is a scheduler to do it."""
        if self._next_deadline_look is not None:
            self._next_deadline_look.cancel()
        waits = self._engine.core.end_overdue()
        loop = asyncio.get_running_loop()
        self._next_deadline_look = loop.call_later(DEADLINE_LOOK_S, self._end_overdue) if waits else None
        self._clients.flush()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An uncaught error affects only what it concerned. Without memory, or after a library's panic (which is no
        Exception), that could be any request: then all end."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if error is not None and (isinstance(error, MemoryError) or not isinstance(error, Exception)):
            self._fail_ourselves(first_line(error))

    def _fail_ourselves(self, why: str) -> None:
        """End all requests: some would wait for ever for what was lost here. With `--restart`, those of the client
        socket go on with the next frontend."""
        self._link.failed(why)
        if self._config.server.restart:
            self._clients.fall_silent()
        self._fail(why)

    def _fail(self, why: str) -> None:
        """The engine cannot serve any more: end every request with an error, then the process."""
        self._failed = True
        self._end(1)  # first: what follows may fail too
        self._is_over.set()
        logger.error("%s", why)
        self._engine.core.fail_all(why)
        self._clients.flush()

    def _end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    async def _finish(self) -> None:
        if self._traces is not None:
            self._traces.stop()
        core = self._engine.core

        def look(*_: Any) -> None:
            asyncio.get_running_loop().call_soon(lambda: None if core.live_count else self._is_over.set())

        core.observers.append(look)
        if core.live_count:
            await self._is_over.wait()
        if self._next_deadline_look is not None:
            self._next_deadline_look.cancel()
        core.fail_all("the engine has shut down", code="shutting_down", dead=False)
        if self._http is not None:
            await self._http.stop(LAST_WORDS_S)
        asyncio.get_running_loop().remove_reader(self._link.wake_fd)
        self._clients.close()
        await asyncio.sleep(0)  # the core's observers have their turn
        if self._access is not None:
            self._access.close()
        self._outputs_reader.close()
        self._outputs.close()
        self._requests.close(linger=1000)
        self._busy.close()
        self._engine.close()
        self._context.term()
        if self._recorder is not None:
            self._recorder.close()


def _warm_up(tokenizer: Tokenizer) -> None:
    """Import what the first chat needs, while the model loads, and have the tokenizer start its threads: if that fails
    once, for want of memory, it fails for good."""
    tokenizer.encode("a")
    if tokenizer.chat_template:
        from transformers.utils.chat_template_utils import render_jinja_template  # noqa: F401
