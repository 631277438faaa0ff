"""The client SDK for ordinary code: one connection to a running engine.

    with Client("tcp://127.0.0.1:5555") as client:
        print(client.generate("The sea", SamplingParams(max_tokens=32)).text)
        for delta in client.chat([{"role": "user", "content": "Hello"}], {"max_tokens": 200}, stream=True):
            print(delta.text, end="", flush=True)

Needs pyzmq and msgpack only. A client belongs to one thread at a time, and refuses a second one (RuntimeError);
connections are cheap, so give each thread its own. Errors: `RequestError` for what the engine refuses or ends with an
error, `EngineDeadError` if it has lost a process, if there is none at the endpoint or if the connection is lost,
`AccessError` if the keys are wrong, `TimeoutError` if an answer does not come in time. After a loss the client
reconnects by itself; requests that were live go on if it is the same engine that is back (`launch.py --restart`), and
otherwise end; new ones work.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar, Unpack, overload

import zmq

from common import busy_poll
from common import client_messages as wire
from common.config import BUSY_POLL_AUTOMATIC
from common.errors import EngineDeadError, RequestError, StartupError
from common.keys import client_keys as read_client_keys
from common.sockets import EVENTS, MORE, NO_WAIT, READABLE, connect_client
from frontend import client_requests
from frontend.client_requests import Batch, Call, ChatOptions, EmbedOptions, Messages, Params, RequestOptions
from frontend.client_state import (
    HELLO_ID,
    HELLO_PAUSE_S,
    LOOK_S,
    ClientState,
    Connection,
    Inbox,
    OneThread,
    OwnKeys,
    Reply,
    ServerKey,
    raise_error,
    says_hello_again,
)
from frontend.client_streams import Running, RunningEmbedding, Stream

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=wire.ToClient)
Gathered = tuple[bytes, wire.FromClient, Inbox | None]
"""A message that waits to be sent: as bytes, as itself, and the inbox of its replies."""


LOOK_MS = int(LOOK_S * 1000)

_one_that_polls = threading.Lock()
"""Held by the one client of this program that polls busily: several would be in each other's way, since one thread runs
at a time."""


class Client:
    """A connection to a running engine.

    Args:
        endpoint: the engine's client endpoint, `tcp://host:port` or `ipc://path`.
        timeout_s: how long to wait for a connection, and for the answer to every call that is not a generation.
        name: this client's name in the engine's log.
        server_key: for an engine with `--client-keys`: its public key, or the file that contains it.
        client_keys: this client's own keys: the file with its secret key, or the pair (public, secret).
        busy_poll_ms, busy_poll_io: as the engine's options of these names, for this client's waiting.

    Attributes:
        welcome: what the engine serves: model names, `max_model_len`, `vocab_size` (0 if it was still starting after
            `timeout_s`).

    Raises:
        EngineDeadError: there is no engine at the endpoint.
        TimeoutError: there is one, but it does not answer.
        RequestError: the engine has no room for another connection.
        AccessError: the keys are wrong.
        ConfigError: the keys cannot be read, or an option is not allowed.
        StartupError: the endpoint is not valid, or this process has no room for more sockets.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 30.0,
        name: str = "",
        server_key: ServerKey = None,
        client_keys: OwnKeys = None,
        busy_poll_ms: float = BUSY_POLL_AUTOMATIC,
        busy_poll_io: str = "auto",
    ) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._keys = read_client_keys(client_keys, server_key)
        self._hello = client_requests.hello(name)
        self._state = ClientState()
        self._connection = Connection(endpoint, self._keys)
        self._busy = busy_poll.BusyPoll(busy_poll.limit_s_for(busy_poll_ms), alone=_one_that_polls)
        self._is_io_kept_awake = busy_poll.is_io_kept_awake(busy_poll_io, busy_poll_ms)
        self._connect()
        self._give_up_at_s = 0.0
        self._gathers = self._closed = False
        self._sent_count = 0  # how often messages that gathered were sent, since they do
        self._gathered: list[Gathered] = []
        self._in_use = OneThread()
        try:
            self.welcome = self._greet()
        except BaseException:
            self.close()
            raise

    @overload
    def generate(
        self, prompt: str | Sequence[int], params: Params = None, *, stream: Literal[True],
        **options: Unpack[RequestOptions],
    ) -> Stream: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: str | Sequence[int], params: Params = None, *, stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> wire.Final: ...  # fmt: skip

    def generate(
        self,
        prompt: str | Sequence[int],
        params: Params = None,
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Stream | wire.Final:
        """Continue a text or token ids.

        Args:
            prompt: a text, or token ids.
            params: how to sample.
            stream: return a `Stream` of deltas at once, instead of the whole result at the end.
            options: see `RequestOptions`.

        Raises:
            RequestError, EngineDeadError, TimeoutError: see the module's docstring; a stream raises them when read.
        """
        running = self.submit(prompt, params, stream=stream, **options)
        return running if stream else running.whole()

    @overload
    def chat(
        self, messages: Messages, params: Params = None, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Stream: ...

    @overload
    def chat(
        self, messages: Messages, params: Params = None, *, stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> wire.Final: ...  # fmt: skip

    def chat(
        self, messages: Messages, params: Params = None, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> Stream | wire.Final:
        """Answer a chat.

        Args:
            messages: each with `role` and `content`.
            params: how to sample; without a `max_tokens` the answer may fill the context.
            stream: return a `Stream` of deltas at once.
            options: see `ChatOptions`.
        """
        running = self.submit(messages, client_requests.chat_params(params), stream=stream, **options)
        return running if stream else running.whole()

    def generate_batch(
        self,
        prompts: Sequence[wire.Prompt],
        params: Params | Sequence[Params] = None,
        **options: Unpack[ChatOptions],
    ) -> list[wire.Final]:
        """Run many requests at once; the results are in the order of the prompts.

        No more are sent at a time than the engine's queue holds; requests that find it full are sent again.

        Args:
            prompts: texts, token ids or chats.
            params: one for all, or one for each.
            options: see `ChatOptions`.

        Raises:
            RequestError: the first error of any of them. The other requests are aborted first, as with any other error.
        """
        batch: Batch[wire.Final] = Batch(prompts, params)
        return self._run(batch, lambda prompt, each: self.submit(prompt, each, stream=False, **options))

    def embed(self, prompt: wire.Prompt, **options: Unpack[EmbedOptions]) -> wire.EmbedReply:
        """The embedding of a text, token ids or a chat.

        Args:
            prompt: what to embed.
            options: see `EmbedOptions`.

        Raises:
            RequestError, EngineDeadError, TimeoutError: see the module's docstring.
        """
        with self.submit_embedding(prompt, **options) as running:
            return running.result()

    def embed_batch(self, prompts: Sequence[wire.Prompt], **options: Unpack[EmbedOptions]) -> list[wire.EmbedReply]:
        """Embed many prompts at once; results in their order, errors as in `generate_batch`."""
        batch: Batch[wire.EmbedReply] = Batch(prompts, None)
        return self._run(batch, lambda prompt, _: self.submit_embedding(prompt, **options))

    def _run(self, batch: Batch[T], start: Callable[[wire.Prompt, Params], Running[T]]) -> list[T]:
        while wanted := batch.begin_round():
            running: dict[int, Running[T]] = {}
            try:
                with self._together():
                    for index, prompt, each in wanted:
                        while self._state.live_count >= batch.window:
                            self._pump(None)
                        running[index] = start(prompt, each)
                for index, request in running.items():
                    try:
                        batch.finals[index] = request.result()
                    except RequestError as error:
                        batch.refused(error)
            finally:
                for request in running.values():
                    request.close()
            if pause_s := batch.pause_s():
                time.sleep(pause_s)  # of nothing takes 60 us
        return batch.results()

    def submit(
        self, prompt: wire.Prompt, params: Params = None, *, stream: bool = True, **options: Unpack[ChatOptions]
    ) -> Stream:
        """Start a request and return at once.

        Args:
            prompt: a text, token ids, or chat messages.
            params: how to sample.
            stream: have the engine send deltas; otherwise the stream yields nothing, and has only its result.
            options: see `ChatOptions`.
        """
        inbox = self._state.open(options.get("request_id"))
        with self._state.freed_on_error(inbox):
            message = client_requests.generate_message(inbox.request_id, prompt, params, stream=stream, options=options)
            self._send(self._state.streamed(inbox, message), inbox)
        return Stream(self, inbox, options.get("timeout_s"))

    def submit_embedding(self, prompt: wire.Prompt, **options: Unpack[EmbedOptions]) -> RunningEmbedding:
        """Ask for an embedding and return at once; arguments as in `embed`."""
        inbox = self._state.open(options.get("request_id"))
        with self._state.freed_on_error(inbox):
            self._send(client_requests.embed_message(inbox.request_id, prompt, options), inbox)
        return RunningEmbedding(self, inbox, options.get("timeout_s"))

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets a `Final` with the output so far. Unknown ids are ignored."""
        self._state.note_abort(request_id)
        if not self._state.is_resuming:
            self._send(wire.Abort(request_id))

    def tokenize(self, prompt: str | Messages, *, add_special_tokens: bool | None = None) -> list[int]:
        """The token ids of a text or a chat."""
        return self._call(client_requests.tokenize(prompt, add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self._call(client_requests.detokenize(token_ids, skip_special_tokens))

    def status(self) -> wire.StatusReply:
        """The engine's state, limits and figures."""
        return self._call(client_requests.STATUS)

    def ping(self) -> float:
        """Seconds until the engine answers."""
        started_s = time.monotonic()
        self._call(client_requests.PING)
        return time.monotonic() - started_s

    def close(self) -> None:
        """Close the connection; the engine aborts this client's requests."""
        if not self._closed:
            self._closed = True
            self._disconnect()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- below the surface ---------------------------------------------------------------------------------------------

    def _greet(self) -> wire.Welcome:
        """Say hello until the engine has started, or the time is up."""
        give_up_at_s = time.monotonic() + self.timeout_s
        while says_hello_again(welcome := self._call(self._hello, HELLO_ID), give_up_at_s, time.monotonic()):
            time.sleep(HELLO_PAUSE_S)
        return welcome

    def is_live(self, request_id: str) -> bool:
        """Whether a request has not ended yet."""
        return not self._closed and self._state.is_live(request_id)

    def next_reply(self, inbox: Inbox, deadline_s: float | None) -> Reply:
        """Wait for a request's next reply; if it is an error, raise it."""
        while not inbox.replies:
            wait_ms = None if deadline_s is None else math.ceil((deadline_s - time.monotonic()) * 1000)
            if self._closed:
                raise EngineDeadError("this client is closed")
            if wait_ms is not None and wait_ms <= 0:
                raise TimeoutError(f"the engine at {self.endpoint} is silent")
            self._pump(wait_ms)
        reply = inbox.take()
        raise_error(reply)
        return reply

    def _connect(self) -> None:
        self._context, self._socket, self._monitor = connect_client(self.endpoint, self._keys)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        if self._is_io_kept_awake:
            self._busy.keep_awake(self._context)

    def _disconnect(self) -> None:
        if self._socket.closed:
            return
        self._busy.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def _reconnect(self) -> None:
        """With a new socket: nothing that waits in the old one is for whoever comes.

        Raises:
            EngineDeadError: none can be made now. What waited for it has ended; the next call tries again.
        """
        self._disconnect()
        try:
            self._connect()
        except StartupError as error:
            refusal = self._connection.no_socket(error)
            self._state.give_up(refusal)
            raise refusal from None
        self._connection.refusal = None

    def _pump(self, wait_ms: int | None) -> None:
        """Wait until a message comes, then sort all that have come into their requests' inboxes."""
        with self._in_use:
            self._send_gathered()
            if self._state.is_resuming:
                left_ms = max(0, math.ceil((self._give_up_at_s - time.monotonic()) * 1000))
                wait_ms = min(left_ms, LOOK_MS if wait_ms is None else min(wait_ms, LOOK_MS))
            if self._monitor in dict(self._busy.poll(self._poller, wait_ms)):
                self._look_at_connection()
            self._drain()
            if self._state.is_resuming:
                error = self._connection.hopeless(self._state.engine)
                if error or time.monotonic() >= self._give_up_at_s:
                    self._state.give_up(error)

    def _drain(self) -> None:
        """Take what has come, until nobody waits for more: what comes later is found in the next wait."""
        with contextlib.suppress(zmq.Again):
            while True:
                data = self._socket.recv(NO_WAIT)
                self._busy.note()
                for message in self._state.take(data):
                    self._socket.send(message.to_wire(), NO_WAIT)
                if not (self._state.live_count and int(self._socket.get(EVENTS)) & READABLE):
                    return

    def _look_at_connection(self) -> None:
        if self._socket.closed:
            self._reconnect()
        while int(self._monitor.get(EVENTS)) & READABLE:
            if self._connection.note(self._monitor.recv_multipart()):
                self._drain()  # the engine's last words came before the end
                self._state.lose(self._connection.lost())
                self._reconnect()
                self._give_up_at_s = time.monotonic() + self.timeout_s
            elif self._connection.is_up and self._state.engine is not None:  # again
                self._socket.send(self._hello.message(HELLO_ID).to_wire(), NO_WAIT)
                self._give_up_at_s = time.monotonic() + self.timeout_s

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """A context in which messages are sent several at once, the last ones at its end."""
        with self._in_use:
            self._gathers, self._sent_count = True, 0
            try:
                yield
                self._send_gathered()
            finally:
                self._gathers = False
                self._forget_unsent(self._gathered)
                self._gathered = []

    def _send(self, message: wire.FromClient, inbox: Inbox | None = None) -> None:
        with self._in_use:
            if self._gathers and client_requests.is_enough([data for data, _, _ in self._gathered], self._sent_count):
                self._send_gathered(more_follows=True)
            data = client_requests.encoded(message)
            if self._closed:
                raise EngineDeadError("this client is closed")
            self._gathered.append((data, message, inbox))
            if not self._gathers:
                self._send_gathered()

    def _send_gathered(self, *, more_follows: bool = False) -> None:
        if not self._gathered:
            return
        gathered, self._gathered = self._gathered, []
        self._sent_count += 1
        try:
            self._await_connection()
            self._send_together(gathered, more_follows=more_follows)
        except BaseException:
            self._forget_unsent(gathered)
            raise

    def _send_together(self, gathered: Sequence[Gathered], *, more_follows: bool) -> None:
        """Send them as one message. There is no high-water mark: it never waits."""
        *others, last = [data for data, _, _ in gathered] + [wire.MORE_FOLLOWS] * more_follows
        try:
            for data in others:
                self._socket.send(data, MORE)
            self._socket.send(last, NO_WAIT)
            self._busy.note()
            for _, message, inbox in gathered:
                if inbox is not None:
                    self._state.note_sent(inbox, message)
        except BaseException:  # Ctrl-C: the engine may have them, or would take what is sent next for one of them
            self._socket.send(wire.Ping(HELLO_ID).to_wire(), NO_WAIT)
            for _, _, inbox in gathered:
                if inbox is not None:
                    self._socket.send(wire.Abort(inbox.request_id).to_wire(), NO_WAIT)
            raise

    def _forget_unsent(self, gathered: Sequence[Gathered]) -> None:
        for _, _, inbox in gathered:
            if inbox is not None:
                self._state.forget(inbox)

    def _await_connection(self) -> None:
        deadline_s = time.monotonic() + self.timeout_s
        self._look_at_connection()
        while not self._connection.is_up or self._state.is_resuming:
            if error := self._connection.hopeless(self._state.engine):
                raise error
            wait_ms = math.ceil((deadline_s - time.monotonic()) * 1000)
            if wait_ms <= 0:
                raise self._connection.unreachable(self.timeout_s)
            self._pump(min(wait_ms, LOOK_MS))

    def _call(self, call: Call[T, ReplyT], request_id: str | None = None) -> T:
        inbox = self._state.open(request_id)
        with self._state.freed_on_error(inbox):
            self._send(call.message(inbox.request_id), inbox)
            reply = self.next_reply(inbox, time.monotonic() + self.timeout_s)
        assert isinstance(reply, call.reply), f"wanted {call.reply.__name__}, got {type(reply).__name__}"
        return call.value(reply)
