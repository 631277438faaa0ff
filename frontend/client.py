"""The client SDK for ordinary code: one connection to a running engine.

    with Client("tcp://127.0.0.1:5555") as client:
        print(client.generate("The sea", SamplingParams(max_tokens=32)).text)
        for delta in client.chat([{"role": "user", "content": "Hello"}], {"max_tokens": 200}, stream=True):
            print(delta.text, end="", flush=True)

Needs pyzmq and msgpack only. A client belongs to one thread at a time; connections are cheap, so give each thread its
own. Errors: `RequestError` for what the engine refuses or ends with an error, `EngineDeadError` if no engine is at the
endpoint or the connection is lost, `TimeoutError` if an answer does not come in time. After a loss the client connects
again by itself: requests that were live are gone, new ones work.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, overload

import zmq

from common import client_messages as wire
from common.errors import EngineDeadError, RequestError
from common.sockets import connect_client, tells_connected
from frontend import client_state
from frontend.client_state import HELLO_ID, ClientState, Inbox, Params, Reply

Messages = Sequence[Mapping[str, Any]]
ReplyT = TypeVar("ReplyT", bound=wire.ToClient)
ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Client:
    """A connection to a running engine.

    Args:
        endpoint: the engine's client endpoint, `tcp://host:port` or `ipc://path`.
        timeout_s: how long to wait for the engine to answer anything but a generation, the connection included.
        name: how the engine's log calls this client.

    Attributes:
        welcome: what the engine serves: model names, `max_model_len`, `vocab_size`.

    Raises:
        EngineDeadError: nobody answers.
    """

    def __init__(self, endpoint: str, *, timeout_s: float = 30.0, name: str = "") -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._state = ClientState()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._monitor = connect_client(self._context, endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._closed = False
        self._connected = False
        try:
            self.welcome = self._ask(
                self._state.open(HELLO_ID), wire.Hello(client_name=name), wire.Welcome, "does not answer"
            )
        except BaseException:
            self.close()
            raise

    @overload
    def generate(
        self, prompt: str | Sequence[int], params: Params = None, *, stream: Literal[True], **options: Any
    ) -> "Stream": ...

    @overload
    def generate(
        self, prompt: str | Sequence[int], params: Params = None, *, stream: Literal[False] = False, **options: Any
    ) -> wire.Final: ...

    def generate(
        self, prompt: str | Sequence[int], params: Params = None, *, stream: bool = False, **options: Any
    ) -> "Stream | wire.Final":
        """Continue a text or token ids.

        Args:
            prompt: a text, or token ids.
            params: how to sample.
            stream: return a `Stream` of deltas at once, instead of the whole result at the end.
            options: see `submit`.

        Raises:
            RequestError, EngineDeadError, TimeoutError: see the module's docstring; a stream raises them on the way.
        """
        running = self.submit(prompt, params, stream=stream, **options)
        return running if stream else running.result()

    @overload
    def chat(self, messages: Messages, params: Params = None, *, stream: Literal[True], **options: Any) -> "Stream": ...

    @overload
    def chat(
        self, messages: Messages, params: Params = None, *, stream: Literal[False] = False, **options: Any
    ) -> wire.Final: ...

    def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> "Stream | wire.Final":
        """Answer a chat.

        Args:
            messages: each with `role` and `content`.
            params: how to sample; without a `max_tokens` the answer may fill the context.
            stream: return a `Stream` of deltas at once.
            tools: JSON descriptions of functions, for the chat template.
            template_kwargs: further variables of the chat template.
            continue_final_message: go on with the last message instead of answering it.
            options: see `submit`.
        """
        chat = client_state.chat_options(tools, template_kwargs, continue_final_message)
        running = self.submit(messages, client_state.chat_params(params), stream=stream, chat=chat, **options)
        return running if stream else running.result()

    def generate_batch(
        self, prompts: Sequence[wire.Prompt], params: Params | Sequence[Params] = None, **options: Any
    ) -> list[wire.Final]:
        """Run many requests at once; results in the order of the prompts.

        No more are sent at a time than the engine's queue takes, and what finds it full is sent again.

        Args:
            prompts: texts, token ids or chats.
            params: one for all, or one for each.
            options: see `submit`.

        Raises:
            RequestError: the first error of any of them, after the others were aborted; so is any other error.
        """
        each = params if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts")
        pairs = zip(prompts, each, strict=True)
        starts = [partial(self.submit, prompt, wanted, stream=False, **options) for prompt, wanted in pairs]
        return self._run_batch(starts, client_state.batch_window(each))

    def embed(self, prompt: wire.Prompt, **options: Any) -> wire.EmbedReply:
        """The embedding of a text, token ids or a chat.

        Args:
            prompt: what to embed.
            options: see `submit_embedding`.

        Raises:
            RequestError, EngineDeadError, TimeoutError: see the module's docstring.
        """
        with self.submit_embedding(prompt, **options) as running:
            return running.result()

    def embed_batch(self, prompts: Sequence[wire.Prompt], **options: Any) -> list[wire.EmbedReply]:
        """Embed many prompts at once; results in their order, errors as in `generate_batch`."""
        starts = [partial(self.submit_embedding, prompt, **options) for prompt in prompts]
        return self._run_batch(starts, client_state.BATCH_SAMPLES)

    def _run_batch(self, starts: "Sequence[Callable[[], Running[ResultT]]]", window: int) -> list[ResultT]:
        """Results in the order of what starts the requests; what finds the queue full is started again."""
        results: dict[int, ResultT] = {}
        while left := {index: start for index, start in enumerate(starts) if index not in results}:
            served, full = self._run_round(left, window)
            results |= served
            if full is not None:
                if not results:
                    raise full
                time.sleep((full.retry_after_ms or 0) / 1000)
        return [results[index] for index in range(len(starts))]

    def _run_round(
        self, starts: "Mapping[int, Callable[[], Running[ResultT]]]", window: int
    ) -> tuple[dict[int, ResultT], RequestError | None]:
        """Results by index, and the refusal of those that found the queue full."""
        running: dict[int, Running[ResultT]] = {}
        results: dict[int, ResultT] = {}
        full: RequestError | None = None
        try:
            for index, start in starts.items():
                while self._state.live_count >= window:
                    self._pump(None)
                running[index] = start()
            for index, request in running.items():
                try:
                    results[index] = request.result()
                except RequestError as error:
                    if error.code != "queue_full":
                        raise
                    full = error
        finally:
            for request in running.values():
                request.close()
        return results, full

    def submit(
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
    ) -> "Stream":
        """Start a request and return at once.

        Args:
            prompt: a text, token ids, or chat messages.
            params: how to sample.
            stream: have the engine send deltas; without them the stream holds nothing but its result.
            request_id: your own name for it, unique among this client's live requests; `auto:` begins those of others.
            priority: lower goes first.
            cache_salt: cached prefixes are shared only under the same salt.
            timeout_s: seconds after which the engine ends the request with an error.
            add_special_tokens: put BOS before the prompt as the tokenizer does; by default for texts, not for chats.
            chat: chat options as the wire has them.
        """
        inbox = self._state.open(request_id)
        with self._state.freed_on_error(inbox):
            message = client_state.generate_message(
                inbox.request_id, prompt, params, stream=stream, priority=priority, cache_salt=cache_salt,
                timeout_s=timeout_s, add_special_tokens=add_special_tokens, chat=chat,
            )  # fmt: skip
            self._send(message)
        return Stream(self, inbox, timeout_s)

    def submit_embedding(
        self,
        prompt: wire.Prompt,
        *,
        pooling: str = "",
        request_id: str | None = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> "RunningEmbedding":
        """Ask for an embedding and return at once.

        Args:
            prompt: a text, token ids, or chat messages.
            pooling: `last` or `mean`; empty for what the engine was started with.
            request_id, timeout_s: as in `submit`.
            options: `priority`, `cache_salt`, `add_special_tokens`, `chat` as in `submit`.
        """
        inbox = self._state.open(request_id)
        with self._state.freed_on_error(inbox):
            self._send(
                client_state.embed_message(inbox.request_id, prompt, pooling=pooling, timeout_s=timeout_s, **options)
            )
        return RunningEmbedding(self, inbox, timeout_s)

    def abort(self, request_id: str) -> None:
        """End a request; its stream gets its `Final` with what there is. Unknown ids are ignored."""
        self._send(wire.Abort(request_id))

    def tokenize(self, prompt: str | Messages, *, add_special_tokens: bool | None = None) -> list[int]:
        """The token ids of a text or a chat."""
        inbox = self._state.open()
        message = wire.Tokenize(inbox.request_id, prompt, add_special_tokens)
        return list(self._ask(inbox, message, wire.TokenizeReply).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        inbox = self._state.open()
        message = wire.Detokenize(inbox.request_id, client_state.as_ids(token_ids), skip_special_tokens)
        return self._ask(inbox, message, wire.DetokenizeReply).text

    def status(self) -> wire.StatusReply:
        """How the engine is."""
        inbox = self._state.open()
        return self._ask(inbox, wire.GetStatus(inbox.request_id), wire.StatusReply)

    def ping(self) -> float:
        """Seconds until the engine answers."""
        inbox = self._state.open()
        started_s = time.monotonic()
        self._ask(inbox, wire.Ping(inbox.request_id), wire.Pong)
        return time.monotonic() - started_s

    def close(self) -> None:
        """Close the connection; the engine aborts what is still running."""
        if not self._closed:
            self._closed = True
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            self._context.term()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- below the surface ---------------------------------------------------------------------------------------------

    def is_live(self, request_id: str) -> bool:
        """Whether a request's end has not come yet."""
        return not self._closed and self._state.is_live(request_id)

    def next_reply(self, inbox: Inbox, deadline_s: float | None, what: str = "is silent") -> Reply:
        """Wait for a request's next reply; raises what it says if it is an error."""
        while not inbox.replies:
            wait_ms = None if deadline_s is None else math.ceil((deadline_s - time.monotonic()) * 1000)
            if self._closed:
                raise EngineDeadError("this client is closed")
            if wait_ms is not None and wait_ms <= 0:
                raise TimeoutError(f"the engine at {self.endpoint} {what}")
            self._pump(wait_ms)
        reply = inbox.replies.popleft()
        client_state.raise_error(reply)
        return reply

    def _pump(self, wait_ms: int | None) -> None:
        """Wait for anything to come, and sort all that has."""
        self._poller.poll(wait_ms)
        self._look_at_connection()
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._state.take(self._socket.recv(zmq.NOBLOCK))

    def _look_at_connection(self) -> None:
        while int(self._monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            self._connected = tells_connected(self._monitor.recv_multipart())
            if not self._connected:
                self._drain()  # the engine's last words came before the end
                self._state.lost(f"the connection to the engine at {self.endpoint} is lost")

    def _send(self, message: wire.FromClient) -> None:
        data = client_state.encoded(message)
        if self._closed:
            raise EngineDeadError("this client is closed")
        deadline_s = time.monotonic() + self.timeout_s
        self._look_at_connection()
        while not self._connected:
            wait_ms = math.ceil((deadline_s - time.monotonic()) * 1000)
            if wait_ms <= 0 or not self._monitor.poll(wait_ms):
                raise EngineDeadError(f"no engine can be reached at {self.endpoint} within {self.timeout_s:g} s")
            self._look_at_connection()
        self._socket.send(data, zmq.NOBLOCK)  # no high-water mark: it never waits

    def _ask(self, inbox: Inbox, message: wire.FromClient, kind: type[ReplyT], what: str = "is silent") -> ReplyT:
        with self._state.freed_on_error(inbox):
            self._send(message)
            reply = self.next_reply(inbox, time.monotonic() + self.timeout_s, what)
        assert isinstance(reply, kind), f"wanted {kind.__name__}, got {type(reply).__name__}"
        return reply


class Running(Protocol[ResultT_co]):
    """A request that is under way."""

    def result(self) -> ResultT_co:
        """Wait for the end."""

    def close(self) -> None:
        """Abort the request if it is still running."""


class RunningEmbedding:
    """One running request for an embedding.

    Attributes:
        request_id: the request's name.
    """

    def __init__(self, client: Client, inbox: Inbox, timeout_s: float | None) -> None:
        self.request_id = inbox.request_id
        self._client = client
        self._inbox = inbox
        self._deadline_s = client_state.deadline_after(timeout_s, time.monotonic())

    def result(self) -> wire.EmbedReply:
        """Wait for it; to be called once."""
        reply = self._client.next_reply(self._inbox, self._deadline_s)
        assert isinstance(reply, wire.EmbedReply), f"wanted EmbedReply, got {type(reply).__name__}"
        return reply

    def close(self) -> None:
        """Abort the request if it is still running."""
        if self._client.is_live(self.request_id):
            self._client.abort(self.request_id)

    def __enter__(self) -> "RunningEmbedding":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """One running request: iterate over its deltas, or take its `result`.

    Leaving it early (`close`, or the end of a `with` block) aborts the request.

    Attributes:
        request_id: the request's name.
        final: the whole result, once the iteration has ended.
    """

    def __init__(self, client: Client, inbox: Inbox, timeout_s: float | None) -> None:
        self.request_id = inbox.request_id
        self.final: wire.Final | None = None
        self._client = client
        self._inbox = inbox
        self._deadline_s = client_state.deadline_after(timeout_s, time.monotonic())

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> wire.Delta:
        if self.final is None:
            reply = self._client.next_reply(self._inbox, self._deadline_s)
            if isinstance(reply, wire.Delta):
                return reply
            assert isinstance(reply, wire.Final), f"wanted Delta or Final, got {type(reply).__name__}"
            self.final = reply
        raise StopIteration

    def result(self) -> wire.Final:
        """Wait for the end; what was not iterated over is in the result too."""
        for _ in self:
            pass
        assert self.final is not None
        return self.final

    def abort(self) -> None:
        """End the request; its end follows in the iteration."""
        if self._client.is_live(self.request_id):
            self._client.abort(self.request_id)

    def close(self) -> None:
        """Abort the request if it is still running."""
        self.abort()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
