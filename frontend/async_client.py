"""The client SDK for asyncio code; the same as `client.Client`, with `await` and `async for`.

    async with AsyncClient("tcp://127.0.0.1:5555") as client:
        result = await client.generate("The sea", SamplingParams(max_tokens=32))
        async for delta in await client.submit("The sky"):
            print(delta.text, end="")

Belongs to the event loop it was opened in. Errors are those of `client.Client`.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import zmq

from common import client_messages as wire
from common.errors import EngineDeadError
from common.sockets import connect_client, tells_connected
from frontend import client_state
from frontend.client_state import HELLO_ID, ClientState, Inbox, Params, Reply
from frontend.zmq_reader import ZmqReader

Messages = Sequence[Mapping[str, Any]]
ReplyT = TypeVar("ReplyT", bound=wire.ToClient)


class AsyncInbox(Inbox):
    """An inbox that a task can wait at."""

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
        return self.replies.popleft()


class AsyncClient:
    """A connection to a running engine; open it with `async with`, or `await client.open()`.

    Args:
        endpoint: the engine's client endpoint, `tcp://host:port` or `ipc://path`.
        timeout_s: how long to wait for the engine to answer anything but a generation, the connection included.
        name: how the engine's log calls this client.

    Attributes:
        welcome: what the engine serves: model names, `max_model_len`, `vocab_size`.
    """

    def __init__(self, endpoint: str, *, timeout_s: float = 30.0, name: str = "") -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.welcome: wire.Welcome
        self._name = name
        self._state = ClientState(AsyncInbox)
        self._closed = True

    async def open(self) -> "AsyncClient":
        """Connect.

        Raises:
            EngineDeadError: nobody answers.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._monitor = connect_client(self._context, self.endpoint)
        self._reader = ZmqReader(self._socket, lambda frames: self._state.take(frames[-1]))
        self._monitor_reader = ZmqReader(self._monitor, self._on_connection)
        self._closed = False
        self._connected = asyncio.Event()
        try:
            hello = wire.Hello(client_name=self._name)
            self.welcome = await self._ask(self._inbox(HELLO_ID), hello, wire.Welcome)
        except BaseException:
            await self.close()
            raise
        return self

    async def generate(self, prompt: str | Sequence[int], params: Params = None, **options: Any) -> wire.Final:
        """Continue a text or token ids; the whole result. For deltas on the way see `submit`.

        Raises:
            RequestError, EngineDeadError, TimeoutError: as `client.Client` has them.
        """
        stream = await self.submit(prompt, params, stream=False, **options)
        return await stream.result()

    async def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> wire.Final:
        """Answer a chat; arguments as `client.Client.chat` has them."""
        stream = await self.submit_chat(
            messages, params, stream=False, tools=tools, template_kwargs=template_kwargs,
            continue_final_message=continue_final_message, **options,
        )  # fmt: skip
        return await stream.result()

    async def embed(
        self,
        prompt: wire.Prompt,
        *,
        pooling: str = "",
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> wire.EmbedReply:
        """The embedding of a text, token ids or a chat; arguments as `client.Client.submit_embedding` has them.

        A task that is cancelled here aborts the request.
        """
        inbox = self._inbox(request_id)
        with self._state.freed_on_error(inbox):
            await self._send(
                client_state.embed_message(inbox.request_id, prompt, pooling=pooling, timeout_s=timeout_s, **options)
            )
            try:
                async with asyncio.timeout_at(
                    client_state.deadline_after(timeout_s, asyncio.get_running_loop().time())
                ):  # fmt: skip
                    reply = await inbox.next()
            except asyncio.CancelledError:
                await self.abort(inbox.request_id)
                raise
        client_state.raise_error(reply)
        assert isinstance(reply, wire.EmbedReply), f"wanted EmbedReply, got {type(reply).__name__}"
        return reply

    async def submit_chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> "AsyncStream":
        """Start answering a chat; the stream of its deltas."""
        chat = client_state.chat_options(tools, template_kwargs, continue_final_message)
        return await self.submit(messages, client_state.chat_params(params), chat=chat, **options)

    async def submit(
        self,
        prompt: wire.Prompt,
        params: Params = None,
        *,
        stream: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        add_special_tokens: bool | None = None,
        chat: Mapping[str, Any] | None = None,
    ) -> "AsyncStream":
        """Start a request; arguments as `client.Client.submit` has them."""
        inbox = self._inbox(request_id)
        with self._state.freed_on_error(inbox):
            message = client_state.generate_message(
                inbox.request_id, prompt, params, stream=stream, priority=priority, cache_salt=cache_salt,
                timeout_s=timeout_s, add_special_tokens=add_special_tokens, chat=chat,
            )  # fmt: skip
            await self._send(message)
        return AsyncStream(self, inbox, timeout_s)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets its `Final` with what there is. Unknown ids are ignored."""
        await self._send(wire.Abort(request_id))

    async def tokenize(self, prompt: str | Messages, *, add_special_tokens: bool | None = None) -> list[int]:
        """The token ids of a text or a chat."""
        inbox = self._inbox()
        message = wire.Tokenize(inbox.request_id, prompt, add_special_tokens)
        return list((await self._ask(inbox, message, wire.TokenizeReply)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        inbox = self._inbox()
        message = wire.Detokenize(inbox.request_id, client_state.as_ids(token_ids), skip_special_tokens)
        return (await self._ask(inbox, message, wire.DetokenizeReply)).text

    async def status(self) -> wire.StatusReply:
        """How the engine is."""
        inbox = self._inbox()
        return await self._ask(inbox, wire.GetStatus(inbox.request_id), wire.StatusReply)

    async def ping(self) -> float:
        """Seconds until the engine answers."""
        inbox = self._inbox()
        started_s = time.monotonic()
        await self._ask(inbox, wire.Ping(inbox.request_id), wire.Pong)
        return time.monotonic() - started_s

    async def close(self) -> None:
        """Close the connection; the engine aborts what is still running."""
        if not self._closed:
            self._closed = True
            self._state.lost("this client is closed")
            self._monitor_reader.close()
            self._reader.close()
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            self._context.term()

    async def __aenter__(self) -> "AsyncClient":
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- below the surface ---------------------------------------------------------------------------------------------

    def is_live(self, request_id: str) -> bool:
        """Whether a request's end has not come yet."""
        return not self._closed and self._state.is_live(request_id)

    def _inbox(self, request_id: str | None = None) -> AsyncInbox:
        inbox = self._state.open(request_id)
        assert isinstance(inbox, AsyncInbox)
        return inbox

    def _on_connection(self, event: list[bytes]) -> None:
        if tells_connected(event):
            self._connected.set()
        else:
            self._connected.clear()
            while self._reader.drain():  # the engine's last words came before the end
                pass
            self._state.lost(f"the connection to the engine at {self.endpoint} is lost")

    async def _send(self, message: wire.FromClient) -> None:
        data = client_state.encoded(message)
        if self._closed:
            raise EngineDeadError("this client is closed")
        if not self._connected.is_set():
            try:
                await asyncio.wait_for(self._connected.wait(), self.timeout_s)
            except TimeoutError:
                why = f"no engine can be reached at {self.endpoint} within {self.timeout_s:g} s"
                raise EngineDeadError(why) from None
        self._socket.send(data, zmq.NOBLOCK)  # no high-water mark: it never waits
        self._reader.recheck()

    async def _ask(self, inbox: AsyncInbox, message: wire.FromClient, kind: type[ReplyT]) -> ReplyT:
        with self._state.freed_on_error(inbox):
            await self._send(message)
            try:
                reply = await asyncio.wait_for(inbox.next(), self.timeout_s)
            except TimeoutError:
                raise TimeoutError(f"the engine at {self.endpoint} is silent") from None
        client_state.raise_error(reply)
        assert isinstance(reply, kind), f"wanted {kind.__name__}, got {type(reply).__name__}"
        return reply


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
        self._deadline_s = client_state.deadline_after(timeout_s, asyncio.get_running_loop().time())

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> wire.Delta:
        if self.final is None:
            async with asyncio.timeout_at(self._deadline_s):
                reply = await self._inbox.next()
            client_state.raise_error(reply)
            if isinstance(reply, wire.Delta):
                return reply
            assert isinstance(reply, wire.Final), f"wanted Delta or Final, got {type(reply).__name__}"
            self.final = reply
        raise StopAsyncIteration

    async def result(self) -> wire.Final:
        """Wait for the end; what was not iterated over is in the result too."""
        async for _ in self:
            pass
        assert self.final is not None
        return self.final

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
