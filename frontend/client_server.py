"""The client socket: a ROUTER that client programs connect to. Translates between their messages and the engine.

Owns the socket, a record for each client that has something under way, and a sink for each live request. Called by the
frontend's main: `flush` after every batch of messages from the scheduler, `close` at the end. Knows the wire format
only through `common.client_messages`.

All that a step produces for one client is sent as one message. A client that does not read is cut off: when
`CLIENT_QUEUE_LIMIT` messages wait for it, its requests are aborted. So are those of a client that has gone: whenever a
connection ends (ZeroMQ's heartbeats end that of a client that vanished without a word), every client with live requests
is sent a Pong, and sending fails for the one that is not there.

With `--restart` a lost frontend is started again, and clients ask once more for what they had (Resume). Requests wait
here until the new frontend has heard of the engine.
"""

import asyncio
import logging
from array import array
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

import zmq

from common import client_messages as wire
from common.config import step_limits
from common.errors import RequestError, WireError
from common.sockets import MORE, NO_WAIT
from frontend.client_access import ClientAccess, key_of
from frontend.client_monitor import ClientMonitor
from frontend.client_records import ClientRecord, ClientSink, EmbedSink, error_reply
from frontend.engine import Engine
from frontend.prompt import ChatPrompt, Prompt
from frontend.request_checks import EMBEDDING_PARAMS
from frontend.zmq_reader import ZmqReader

LIVE_LIMIT = 65_536
"""Live requests that one client may have."""
FIRST_PROBE_S = 0.02
PROBE_INTERVAL_S = 0.3
PROBE_COUNT = 2
"""How often to check which client is gone after a connection has ended: the socket notices later than its monitor."""

KEY_CHECK_INTERVAL_S = 1.0
"""How often to check, while requests of clients with keys run, whether those keys are still valid."""


Samples = Sequence[wire.SampleSoFar] | None
"""What a client has of a request that it asks for again; None for a new request."""

logger = logging.getLogger(__name__)


class ClientServer:
    """Serves the client socket.

    Args:
        engine: does the work.
        socket: a bound ROUTER with ROUTER_MANDATORY; closed by `close`.
        access: decides which clients may connect, where the socket has keys.

    Attributes:
        touched: clients that the next flush sends something to.
    """

    def __init__(self, engine: Engine, socket: "zmq.Socket[bytes]", access: ClientAccess | None = None) -> None:
        self.touched: dict[bytes, ClientRecord] = {}
        self._engine = engine
        self._is_known = asyncio.Event()
        self._is_silent = False
        self._taking_up = asyncio.Lock()
        self._socket = socket
        self._clients: dict[bytes, ClientRecord] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._access = access
        self._reader = (
            ZmqReader(socket, self.on_frames, self.flush)
            if access is None
            else ZmqReader(socket, self._on_keyed_frames, self.flush, copy=False)
        )
        self._next_key_check: asyncio.TimerHandle | None = None
        self._probes_left = 0
        self._next_probe: asyncio.TimerHandle | None = None
        self._monitor = ClientMonitor(socket, engine.connections, self._on_disconnect)

    def flush(self) -> None:
        """Send what has gathered since the last flush, to the scheduler and to clients. Never blocks."""
        if not self._is_known.is_set() and self._engine.limits is not None:
            self._is_known.set()
        self._engine.core.send_gathered()
        while self.touched:
            _, client = self.touched.popitem()
            for message in client.messages():
                if not self._send(client, message):
                    break
            if not client.live and not client.task_count and not client.gone:
                del self._clients[client.identity]
        self._reader.recheck()

    def close(self, linger_ms: int = 1000) -> None:
        """Send what is left, stop reading and close the socket."""
        stopping = RequestError("the engine has shut down", code="shutting_down", status=503)
        for client in list(self._clients.values()):
            self._fail_all(client, stopping)
        self.flush()
        for task in self._tasks:
            task.cancel()
        for timer in (self._next_probe, self._next_key_check):
            if timer is not None:
                timer.cancel()
        self._monitor.close()
        self._reader.close()
        self._socket.close(linger=linger_ms)

    def fall_silent(self) -> None:
        """This frontend has failed and is started again: send nothing more, no error either. Clients whose connection
        ends ask the next frontend for what they had."""
        self._is_silent = True

    def _on_disconnect(self) -> None:
        self._probes_left = PROBE_COUNT
        if self._next_probe is None:
            self._next_probe = asyncio.get_running_loop().call_later(FIRST_PROBE_S, self._probe_clients)

    def _probe_clients(self) -> None:
        """Send every client a Pong; sending fails for those that are gone."""
        self._probes_left -= 1
        self._next_probe = None
        if self._probes_left:
            self._next_probe = asyncio.get_running_loop().call_later(PROBE_INTERVAL_S, self._probe_clients)
        for client in list(self._clients.values()):
            self._send(client, wire.Pong("").to_wire())
        self.flush()

    def _send(self, client: ClientRecord, message: bytes) -> bool:
        if client.gone or self._is_silent:
            return False
        try:
            self._socket.send(client.identity, MORE)
            self._socket.send(message, NO_WAIT)
        except zmq.Again:
            self._drop(client, "it does not read what it is sent", logging.WARNING)
            return False
        except zmq.ZMQError as error:
            self._drop(client, "it is gone" if error.errno == zmq.EHOSTUNREACH else str(error))
            return False
        return True

    def _drop(self, client: ClientRecord, why: str, level: int = logging.INFO) -> None:
        """End all requests of a client that cannot be reached."""
        client.gone = True
        del self._clients[client.identity]
        if client.live:
            logger.log(level, "client %s: aborting its requests (%d): %s", client.key, len(client.live), why)
        for sink in list(client.live.values()):
            sink.aborted = True
            if sink.request is not None:
                self._engine.core.abort(sink.request.request_id)
        client.rows, client.ends = [], []

    # -- messages in ---------------------------------------------------------------------------------------------------

    def _on_keyed_frames(self, frames: list[zmq.Frame]) -> None:
        """Handle a message on a socket with keys; the sender's key may have been revoked since it connected."""
        identity, *parts = [frame.bytes for frame in frames]
        key = key_of(frames[-1])
        if key and self._access is not None:
            if not self._access.allows(key):
                for data in filter(None, parts[: wire.FRAMES_LIMIT]):
                    self._refuse(self._record_of(identity), wire.request_id_of(data), _revoked())
                return
            self._record_of(identity).public_key = key
            self._check_keys_later()
        self.on_frames([identity, *parts])

    def _check_keys_later(self) -> None:
        if self._next_key_check is None:
            self._next_key_check = asyncio.get_running_loop().call_later(KEY_CHECK_INTERVAL_S, self._check_keys)

    def _check_keys(self) -> None:
        """End the requests of clients whose key has been revoked; check again while anybody has requests."""
        self._next_key_check = None
        for client in [client for client in self._clients.values() if client.public_key and client.live]:
            if self._access is not None and not self._access.allows(client.public_key):
                logger.warning("client %s: its key was revoked; ending its requests (%d)", client.key, len(client.live))
                self._fail_all(client, _revoked())
            else:
                self._check_keys_later()
        self.flush()

    def _fail_all(self, client: ClientRecord, error: RequestError) -> None:
        for sink in list(client.live.values()):
            sink.aborted = True
            if sink.request is not None and not sink.is_ending:
                self._engine.core.fail(sink.request.request_id, error)
            else:
                sink.on_failed(error)

    def _record_of(self, identity: bytes) -> ClientRecord:
        client = self._clients.get(identity)
        if client is None:
            client = self._clients[identity] = ClientRecord(self.touched, identity)
        return client

    def on_frames(self, frames: list[bytes]) -> None:
        """Handle what came at once: its sender's identity, then one message in each frame, and maybe MORE_FOLLOWS."""
        identity, *parts = frames
        if more_follows := len(parts) > 1 and parts[-1] == wire.MORE_FOLLOWS:
            parts.pop()
        client = self._record_of(identity)
        client.touch()
        if 0 < len(parts) <= wire.FRAMES_LIMIT:
            for data in parts:
                self._engine.core.gather()  # `flush` comes after all messages that have come
                self._on_message(client, data)
        else:
            text = f"wanted 1 to {wire.FRAMES_LIMIT} messages at once, got {len(parts)}"
            self._refuse(client, "", RequestError(text, code="bad_message"))
        if more_follows:
            self._engine.core.promise(identity, True)

    def _on_message(self, client: ClientRecord, data: bytes) -> None:
        """Handle one message. A request ends its client's word of more, which may stand behind it again."""
        try:
            message = wire.decode_from_client(data)
        except WireError as error:
            refusal = RequestError(str(error)[:1000], code="bad_message")
            self._refuse(client, wire.request_id_of(data), refusal)
            return
        except MemoryError:
            refusal = RequestError("there is no memory for this message", code="internal_error", status=500)
            self._refuse(client, wire.request_id_of(data), refusal)
            return
        if isinstance(message, wire.Generate | wire.Embed | wire.Resume):
            self._engine.core.promise(client.identity, False)
        try:
            self._dispatch(client, message)
        except BaseException as error:  # panics of the tokenizer are no Exceptions
            self._refuse(client, getattr(message, "request_id", ""), error)

    def _dispatch(self, client: ClientRecord, message: wire.FromClient) -> None:
        match message:
            case wire.Generate():
                self._generate(client, message)
            case wire.Embed():
                self._embed(client, message)
            case wire.Resume(wire.Generate() as request, samples):
                self._generate(client, request, samples)
            case wire.Resume(wire.Embed() as request):
                self._embed(client, request, ())
            case wire.Abort():
                self._abort(client, message.request_id)
            case wire.Tokenize():
                self._start(client, message.request_id, self._tokenize(client, message))
            case wire.Detokenize():
                self._start(client, message.request_id, self._detokenize(client, message))
            case wire.GetStatus():
                self._reply(client, self._status(message.request_id))
            case wire.Ping():
                self._reply(client, wire.Pong(message.request_id))
            case wire.Hello():
                self._welcome(client, message)

    def _reply(self, client: ClientRecord, reply: wire.ToClient) -> None:
        client.ends.append(reply.to_wire())
        client.touch()

    def _refuse(self, client: ClientRecord, request_id: str, error: BaseException) -> None:
        """Answer with what went wrong; without an answer the client would wait for ever."""
        if not isinstance(error, RequestError):
            logger.error("a client's request failed", exc_info=error)
            error = RequestError(f"internal error: {error}", code="internal_error", status=500)
        self._reply(client, error_reply(request_id, error))

    def _start(self, client: ClientRecord, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run work that takes time as a task; its errors become replies."""

        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self._refuse(client, request_id, error)
            finally:
                client.task_count -= 1
                client.touch()
            self.flush()

        client.task_count += 1
        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- one method per message ----------------------------------------------------------------------------------------

    def _generate(self, client: ClientRecord, message: wire.Generate, resumed: Samples = None) -> None:
        self._check_new(client, message.request_id, is_new=resumed is None)
        params = self._engine.make_params(message.params, model_defaults=message.model_defaults)
        sink = ClientSink(client, message.request_id, params.n, partial(self._start, client, message.request_id))
        sink.has_output = bool(resumed)
        self._start_request(
            sink, message, params=params, stream=message.stream, starts_text=message.is_chat, resumed=resumed
        )

    def _embed(self, client: ClientRecord, message: wire.Embed, resumed: Samples = None) -> None:
        self._check_new(client, message.request_id, is_new=resumed is None)
        pooling = self._engine.check_pooling(message.pooling)
        sink = EmbedSink(client, message.request_id, 1, partial(self._start, client, message.request_id))
        self._start_request(
            sink,
            message,
            params=EMBEDDING_PARAMS,
            stream=False,
            pooling=pooling,
            resumed=None if resumed is None else (),
        )

    def _check_new(self, client: ClientRecord, request_id: str, *, is_new: bool) -> None:
        if request_id in client.live:
            raise RequestError(
                f"request id {request_id!r} is already in use by a live request of this client",
                code="duplicate_request_id",
                param="request_id",
            )
        if len(client.live) >= LIVE_LIMIT:
            raise RequestError(
                f"this client has {LIVE_LIMIT} live requests, the most there may be", code="too_many", status=429
            )
        if not (is_new or self._engine.name):
            raise RequestError("this engine starts no lost process again (--restart): nothing goes on", param="samples")
        options = self._engine.config.scheduler
        ran_count = 0 if is_new else step_limits(options, "cuda").max_num_seqs  # they come back with those that waited
        if not self._waits() or len(self._tasks) >= options.max_num_queued_reqs + ran_count:
            self._engine.core.check_serving()

    def _waits(self) -> bool:
        """Whether requests wait: this frontend was started again, and has not heard of the engine yet."""
        return self._engine.config.session > 0 and self._engine.core.state == "starting"

    def _start_request(self, sink: ClientSink, message: wire.Generate | wire.Embed, **options: Any) -> None:
        """Encode the prompt and submit the request; `options` are those of `Core.submit`."""
        client = sink.client
        prompt = prompt_of(message.prompt, message.chat)
        options["timings"] = self._engine.core.arrival()
        waits = self._waits()
        at_once = not (waits or sink.has_output)
        token_ids = self._engine.prompt_ids_now(prompt, message.add_special_tokens) if at_once else None
        if token_ids is not None:
            self._submit(sink, message, token_ids, options)
            return

        async def encode_and_submit() -> None:
            """The same when the engine is known, the prompt encoded and, for a request taken up, its turn has come."""
            try:
                if waits:
                    await self._until_known(message.timeout_ms)
                ids = await self._engine.prompt_ids(prompt, message.add_special_tokens)
                if sink.has_output:
                    await self._turn()
                if not sink.aborted:
                    self._submit(sink, message, ids, options)
            except BaseException:
                if sink.aborted:  # its final message has been sent
                    return
                client.live.pop(message.request_id, None)
                raise

        client.live[message.request_id] = sink
        self._start(client, message.request_id, encode_and_submit())

    async def _turn(self) -> None:
        """Wait for a turn to take output up: the loop gets one before each, for that may take a second."""
        async with self._taking_up:
            await asyncio.sleep(0)

    async def _until_known(self, timeout_ms: int | None) -> None:
        """Wait for the engine; raises RequestError when a request's time is up."""
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                await self._is_known.wait()
        except TimeoutError:
            text = "the request's deadline has passed while the engine was being started again"
            raise RequestError(text, code="deadline_exceeded", status=408) from None

    def _submit(
        self,
        sink: ClientSink,
        message: wire.Generate | wire.Embed,
        token_ids: "array[int]",
        options: dict[str, Any],
    ) -> None:
        sink.client.live[sink.request_id] = sink  # ahead of the call: it may be the request's end
        try:
            sink.request = self._engine.core.submit(
                token_ids,
                sink=sink,
                priority=message.priority,
                client_key=sink.client.key,
                cache_salt=message.cache_salt,
                timeout_s=None if message.timeout_ms is None else message.timeout_ms / 1000,
                name=message.request_id,
                **options,
            )
        except BaseException:
            sink.client.live.pop(sink.request_id, None)
            raise
        if sink.is_unwanted:
            self._engine.core.abort(sink.request.request_id)

    def _abort(self, client: ClientRecord, request_id: str) -> None:
        sink = client.live.get(request_id)
        if sink is None:
            return
        if sink.request is None and sink.has_output:
            sink.is_unwanted = True
            return
        sink.aborted = True
        if sink.request is not None:
            self._engine.core.abort(sink.request.request_id)
        else:
            sink.on_never_begun()

    async def _tokenize(self, client: ClientRecord, message: wire.Tokenize) -> None:
        prompt = prompt_of(message.prompt, message.chat)
        token_ids = await self._engine.prompt_ids(prompt, message.add_special_tokens)
        self._reply(client, wire.TokenizeReply(message.request_id, token_ids))

    async def _detokenize(self, client: ClientRecord, message: wire.Detokenize) -> None:
        text = await self._engine.decode(message.token_ids, skip_special_tokens=message.skip_special_tokens)
        self._reply(client, wire.DetokenizeReply(message.request_id, text))

    def _welcome(self, client: ClientRecord, message: wire.Hello) -> None:
        oldest, newest = wire.OLDEST_CLIENT_PROTOCOL_VERSION, wire.CLIENT_PROTOCOL_VERSION
        if not oldest <= message.protocol_version <= newest:
            raise RequestError(
                f"the client speaks protocol version {message.protocol_version}, this engine {oldest} to {newest}",
                code="protocol_version",
            )
        self._monitor.catch_up()
        self._engine.connections.check()
        limits = self._engine.limits
        self._reply(
            client,
            wire.Welcome(
                message.protocol_version,
                self._engine.model_names,
                limits.max_model_len if limits else 0,
                limits.vocab_size if limits else 0,
                self._engine.health().state,
                self._engine.name,
            ),
        )

    def _status(self, request_id: str) -> wire.StatusReply:
        health, limits, stats = self._engine.health(), self._engine.limits, self._engine.stats
        names = ("max_model_len", "max_num_seqs", "block_size", "block_count", "vocab_size")
        return wire.StatusReply(
            request_id,
            health.state,
            health.detail,
            self._engine.model_names,
            self._engine.core.live_count,
            {name: getattr(limits, name) for name in names} if limits else {},
            {name: getattr(stats, name) for name in stats.GAUGES}
            | {"restarts": health.restarts}
            | self._engine.core.figures.step_totals_us(),
        )


def _revoked() -> RequestError:
    return RequestError("this client's key was revoked", code="key_revoked", status=401)


def prompt_of(prompt: wire.Prompt, chat: Any) -> Prompt:
    """A prompt from the wire as the engine takes it.

    Raises:
        RequestError: a chat option that is unknown or of the wrong type.
    """
    if isinstance(prompt, str | array):
        return prompt
    kinds = {
        "tools": list | None,
        "add_generation_prompt": bool,
        "continue_final_message": bool,
        "template_kwargs": dict,
    }
    for name, value in chat.items():
        if name not in kinds:
            raise RequestError(f"chat: unknown option {name!r}; known are {', '.join(kinds)}", param="chat")
        if not isinstance(value, kinds[name]):
            raise RequestError(f"chat.{name}: got {type(value).__name__}", param="chat")
    if not all(isinstance(tool, dict) for tool in chat.get("tools") or []):
        raise RequestError("chat.tools: wanted maps", param="chat")
    messages = [message for message in prompt if isinstance(message, Mapping)]
    return ChatPrompt(messages=messages, **chat)
