"""The client SDK for asyncio code; the same as `client.Client`, with `await` and `async for`.

    async with AsyncClient("tcp://127.0.0.1:5555") as client:
        result = await client.generate("The sea", SamplingParams(max_tokens=32))
        async for delta in await client.submit("The sky"):
            print(delta.text, end="")

Belongs to the event loop it was opened in. Errors are those of `client.Client`. Cancelling a task that waits for a
result aborts the request.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Literal, TypeVar, Unpack, overload

import zmq

from common import client_messages as wire
from common.errors import EngineDeadError, RequestError, StartupError
from common.keys import client_keys as read_client_keys
from common.sockets import MORE, NO_WAIT, connect_client
from frontend import client_requests
from frontend.client_requests import Batch, Call, ChatOptions, EmbedOptions, Messages, Params, RequestOptions
from frontend.client_state import (
    HELLO_ID,
    HELLO_PAUSE_S,
    LOOK_S,
    ClientState,
    Connection,
    Inbox,
    OwnKeys,
    Reply,
    ServerKey,
    deadline_after,
    raise_error,
    says_hello_again,
)
from frontend.zmq_reader import ZmqReader

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", bound=wire.ToClient)


class AsyncInbox(Inbox):
    """An inbox whose next reply a task can await."""

    __slots__ = ("_event",)

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self._event = asyncio.Event()

    def put(self, reply: Reply) -> None:
        """Add a reply and wake who waits."""
        super().put(reply)
        self._event.set()

    async def next(self) -> Reply:
        """The next reply, in order."""
        while not self.replies:
            self._event.clear()
            await self._event.wait()
        return self.take()


class AsyncClient:
    """A connection to a running engine; open it with `async with`, or `await client.open()`.

    Args:
        endpoint, timeout_s, name, server_key, client_keys: as `client.Client` has them.

    Attributes:
        welcome: what the engine serves: model names, `max_model_len`, `vocab_size` (0 if it was still starting after
            `timeout_s`).

    Raises:
        ConfigError: the keys cannot be read.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float = 30.0,
        name: str = "",
        server_key: ServerKey = None,
        client_keys: OwnKeys = None,
    ) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.welcome: wire.Welcome
        self._hello = client_requests.hello(name)
        self._keys = read_client_keys(client_keys, server_key)
        self._state = ClientState(AsyncInbox)
        self._closed = True

    async def open(self) -> "AsyncClient":
        """Connect.

        Raises:
            EngineDeadError: there is no engine at the endpoint.
            TimeoutError: there is one, but it does not answer.
            RequestError: the engine has no room for another connection.
            AccessError: the keys are wrong.
            StartupError: the endpoint is not valid, or this process has no room for more sockets.
        """
        self._connection = Connection(self.endpoint, self._keys)
        self._settled = asyncio.Event()
        self._give_up: asyncio.TimerHandle | None = None
        self._connect()
        self._closed = False
        try:
            self.welcome = await self._greet()
        except BaseException:
            await self.close()
            raise
        return self

    @overload
    async def generate(
        self, prompt: str | Sequence[int], params: Params = None, *, stream: Literal[True],
        **options: Unpack[RequestOptions],
    ) -> "AsyncStream": ...  # fmt: skip

    @overload
    async def generate(
        self, prompt: str | Sequence[int], params: Params = None, *, stream: Literal[False] = False,
        **options: Unpack[RequestOptions],
    ) -> wire.Final: ...  # fmt: skip

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: Params = None,
        *,
        stream: bool = False,
        **options: Unpack[RequestOptions],
    ) -> "AsyncStream | wire.Final":
        """Continue a text or token ids; as `client.Client.generate`."""
        running = await self.submit(prompt, params, stream=stream, **options)
        return running if stream else await running.whole()

    @overload
    async def chat(
        self, messages: Messages, params: Params = None, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> "AsyncStream": ...

    @overload
    async def chat(
        self, messages: Messages, params: Params = None, *, stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> wire.Final: ...  # fmt: skip

    async def chat(
        self, messages: Messages, params: Params = None, *, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> "AsyncStream | wire.Final":
        """Answer a chat; as `client.Client.chat`."""
        running = await self.submit(messages, client_requests.chat_params(params), stream=stream, **options)
        return running if stream else await running.whole()

    async def generate_batch(
        self,
        prompts: Sequence[wire.Prompt],
        params: Params | Sequence[Params] = None,
        **options: Unpack[ChatOptions],
    ) -> list[wire.Final]:
        """Run many requests at once; as `client.Client.generate_batch`."""
        batch: Batch[wire.Final] = Batch(prompts, params)

        async def result(prompt: wire.Prompt, each: Params, more_follows: bool) -> wire.Final:
            stream = await self._submit(prompt, each, stream=False, options=options, more_follows=more_follows)
            return await stream.whole()

        return await self._run(batch, result)

    async def embed(self, prompt: wire.Prompt, **options: Unpack[EmbedOptions]) -> wire.EmbedReply:
        """The embedding of a text, token ids or a chat; as `client.Client.embed`. A task that is cancelled here aborts
        the request."""
        return await self._embed(prompt, options)

    async def _embed(
        self, prompt: wire.Prompt, options: EmbedOptions, *, more_follows: bool = False
    ) -> wire.EmbedReply:
        inbox, timeout_s = self._inbox(options.get("request_id")), options.get("timeout_s")
        with self._state.freed_on_error(inbox):
            message = client_requests.embed_message(inbox.request_id, prompt, options)
            await self._send(message, inbox, more_follows=more_follows)
        try:
            async with asyncio.timeout_at(deadline_after(timeout_s, asyncio.get_running_loop().time())):
                reply = await inbox.next()
        finally:
            if self.is_live(inbox.request_id):
                await self.abort(inbox.request_id)
        raise_error(reply)
        assert isinstance(reply, wire.EmbedReply), f"wanted EmbedReply, got {type(reply).__name__}"
        return reply

    async def embed_batch(
        self, prompts: Sequence[wire.Prompt], **options: Unpack[EmbedOptions]
    ) -> list[wire.EmbedReply]:
        """Embed many prompts at once; as `client.Client.embed_batch`."""
        batch: Batch[wire.EmbedReply] = Batch(prompts, None)

        async def result(prompt: wire.Prompt, _: Params, more_follows: bool) -> wire.EmbedReply:
            return await self._embed(prompt, options, more_follows=more_follows)

        return await self._run(batch, result)

    async def _run(self, batch: Batch[T], result: "Callable[[wire.Prompt, Params, bool], Awaitable[T]]") -> list[T]:
        """Run a batch; `result` makes one request, and tells the engine whether others follow it at once."""
        while wanted := batch.begin_round():
            gate = asyncio.Semaphore(batch.window)
            last = wanted[: batch.window][-1][0]  # of those that do not wait for others' ends
            tasks = [
                asyncio.ensure_future(self._one_of(batch, gate, index, partial(result, prompt, each, index < last)))
                for index, prompt, each in wanted
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(batch.pause_s())
        return batch.results()

    async def _one_of(
        self, batch: Batch[T], gate: asyncio.Semaphore, index: int, result: "Callable[[], Awaitable[T]]"
    ) -> None:  # fmt: skip
        async with gate:
            try:
                batch.finals[index] = await result()
            except RequestError as error:
                batch.refused(error)

    async def submit(
        self, prompt: wire.Prompt, params: Params = None, *, stream: bool = True, **options: Unpack[ChatOptions]
    ) -> "AsyncStream":
        """Start a request; as `client.Client.submit`."""
        return await self._submit(prompt, params, stream=stream, options=options)

    async def _submit(
        self, prompt: wire.Prompt, params: Params, *, stream: bool, options: ChatOptions, more_follows: bool = False
    ) -> "AsyncStream":
        inbox = self._inbox(options.get("request_id"))
        with self._state.freed_on_error(inbox):
            message = client_requests.generate_message(inbox.request_id, prompt, params, stream=stream, options=options)
            await self._send(self._state.streamed(inbox, message), inbox, more_follows=more_follows)
        return AsyncStream(self, inbox, options.get("timeout_s"))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a `Final` with the output so far. Unknown ids are ignored."""
        self._state.note_abort(request_id)
        if not self._state.is_resuming:
            await self._send(wire.Abort(request_id))

    async def tokenize(self, prompt: str | Messages, *, add_special_tokens: bool | None = None) -> list[int]:
        """The token ids of a text or a chat."""
        return await self._call(client_requests.tokenize(prompt, add_special_tokens))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return await self._call(client_requests.detokenize(token_ids, skip_special_tokens))

    async def status(self) -> wire.StatusReply:
        """The engine's state, limits and figures."""
        return await self._call(client_requests.STATUS)

    async def ping(self) -> float:
        """Seconds until the engine answers."""
        started_s = time.monotonic()
        await self._call(client_requests.PING)
        return time.monotonic() - started_s

    async def close(self) -> None:
        """Close the connection; the engine aborts this client's requests."""
        if not self._closed:
            self._closed = True
            self._state.end_all(EngineDeadError("this client is closed"))
            self._disconnect()

    async def __aenter__(self) -> "AsyncClient":
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- below the surface ---------------------------------------------------------------------------------------------

    async def _greet(self) -> wire.Welcome:
        """Say hello until the engine has started, or the time is up."""
        give_up_at_s = time.monotonic() + self.timeout_s
        while says_hello_again(welcome := await self._call(self._hello, HELLO_ID), give_up_at_s, time.monotonic()):
            await asyncio.sleep(HELLO_PAUSE_S)
        return welcome

    def is_live(self, request_id: str) -> bool:
        """Whether a request has not ended yet."""
        return not self._closed and self._state.is_live(request_id)

    def _inbox(self, request_id: str | None = None) -> AsyncInbox:
        inbox = self._state.open(request_id)
        assert isinstance(inbox, AsyncInbox)
        return inbox

    def _connect(self) -> None:
        self._context, self._socket, self._monitor = connect_client(self.endpoint, self._keys)
        self._reader = ZmqReader(self._socket, self._on_message)
        self._monitor_reader = ZmqReader(self._monitor, self._on_connection)
        self._is_lost = False

    def _disconnect(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()
        if self._socket.closed:
            return
        self._monitor_reader.close()
        self._reader.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def _reconnect(self) -> None:
        """With a new socket: nothing that waits in the old one is for whoever comes.

        If none can be made now, what waits for it ends; the next call tries again.
        """
        if self._closed:
            return
        self._disconnect()
        try:
            self._connect()
        except StartupError as error:
            self._state.give_up(self._connection.no_socket(error))
        else:
            self._connection.refusal = None
            self._watch()
        self._settle()

    def _watch(self) -> None:
        """See to it that requests do not wait for ever for an engine that is lost."""
        if self._give_up is not None:
            self._give_up.cancel()
        self._give_up_at_s = time.monotonic() + self.timeout_s
        self._give_up = asyncio.get_running_loop().call_later(min(LOOK_S, self.timeout_s), self._on_silence)

    def _on_silence(self) -> None:
        if not self._state.is_resuming:
            return
        error = self._connection.hopeless(self._state.engine)
        if error is None and time.monotonic() < self._give_up_at_s:
            self._give_up = asyncio.get_running_loop().call_later(LOOK_S, self._on_silence)
            return
        self._state.give_up(error)
        self._settle()

    def _on_message(self, frames: list[bytes]) -> None:
        for message in self._state.take(frames[-1]):
            self._socket.send(message.to_wire(), zmq.NOBLOCK)
        if not self._settled.is_set():
            self._settle()

    def _on_connection(self, event: list[bytes]) -> None:
        if self._is_lost:
            return  # it may have connected again by itself; what would be sent there would be lost with it
        if self._connection.note(event):
            while self._reader.drain():  # the engine's last words came before the end
                pass
            self._is_lost = True
            self._state.lose(self._connection.lost())
            asyncio.get_running_loop().call_soon(self._reconnect)
        elif self._connection.is_up and self._state.engine is not None:  # again
            self._socket.send(self._hello.message(HELLO_ID).to_wire(), zmq.NOBLOCK)
            self._reader.recheck()
            self._watch()
        elif self._connection.refusal is not None and self._state.is_resuming:
            self._state.give_up(self._connection.refusal)
        self._settle()

    def _settle(self) -> None:
        """Let those go on who wait for the connection, if they need not wait any longer."""
        if self._connection.refusal or (self._connection.is_up and not self._state.is_resuming):
            self._settled.set()
        else:
            self._settled.clear()

    async def _send(self, message: wire.FromClient, inbox: Inbox | None = None, *, more_follows: bool = False) -> None:
        data = client_requests.encoded(message)
        if self._closed:
            raise EngineDeadError("this client is closed")
        if self._socket.closed:
            self._reconnect()
        if not self._settled.is_set():
            await self._wait_for_connection()
        if self._closed:
            raise EngineDeadError("this client is closed")
        if not self._connection.is_up and self._connection.refusal:
            raise self._connection.refusal
        self._socket.send(data, MORE if more_follows else NO_WAIT)  # no high-water mark: it never waits
        if more_follows:
            self._socket.send(wire.MORE_FOLLOWS, NO_WAIT)
        if inbox is not None:
            self._state.note_sent(inbox, message)
        self._reader.recheck()

    async def _wait_for_connection(self) -> None:
        """Until there is one, or will be none; raises EngineDeadError if the engine is gone, or the time is over."""
        deadline_s = time.monotonic() + self.timeout_s
        while not self._settled.is_set():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise self._connection.unreachable(self.timeout_s)
            engine, hopeless = self._state.engine, self._connection.hopeless
            if error := hopeless(None) if engine is None else await asyncio.to_thread(hopeless, engine):
                raise error
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), min(left_s, LOOK_S))

    async def _call(self, call: Call[T, ReplyT], request_id: str | None = None) -> T:
        inbox = self._inbox(request_id)
        with self._state.freed_on_error(inbox):
            await self._send(call.message(inbox.request_id), inbox)
            try:
                reply = await asyncio.wait_for(inbox.next(), self.timeout_s)
            except TimeoutError:
                raise TimeoutError(f"the engine at {self.endpoint} is silent") from None
        raise_error(reply)
        assert isinstance(reply, call.reply), f"wanted {call.reply.__name__}, got {type(reply).__name__}"
        return call.value(reply)


class AsyncStream:
    """One running request: iterate over its deltas, or await its `result`.

    Leaving it early (`close`, or the end of an `async with` block) aborts the request.

    Attributes:
        request_id: the request's name.
        final: the whole result, once the iteration has ended.
    """

    def __init__(self, client: AsyncClient, inbox: AsyncInbox, timeout_s: float | None) -> None:
        self.request_id = inbox.request_id
        self.final: wire.Final | None = None
        self._client = client
        self._inbox = inbox
        self._deadline_s = deadline_after(timeout_s, asyncio.get_running_loop().time())

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> wire.Delta:
        if self.final is None:
            async with asyncio.timeout_at(self._deadline_s):
                reply = await self._inbox.next()
            raise_error(reply)
            if isinstance(reply, wire.Delta):
                return reply
            assert isinstance(reply, wire.Final), f"wanted Delta or Final, got {type(reply).__name__}"
            self.final = reply
        raise StopAsyncIteration

    async def result(self) -> wire.Final:
        """Wait for the whole result, including what was not iterated over."""
        async for _ in self:
            pass
        assert self.final is not None
        return self.final

    async def whole(self) -> wire.Final:
        """The whole result, for callers that want nothing else; the request is aborted if this is cancelled."""
        async with self:
            return await self.result()

    async def abort(self) -> None:
        """End the request; its end follows in the iteration."""
        if self._client.is_live(self.request_id):
            await self._client.abort(self.request_id)

    async def close(self) -> None:
        """Abort the request if it is still running."""
        await self.abort()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
