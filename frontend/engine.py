"""The engine as the frontend's asyncio code sees it: prompts in any form go in, streams of events come out.

The HTTP API and the client socket are built on `Engine`; it knows neither. It adds to the core what takes time, that
is, encoding text and rendering chats (`text_work`), and it adds streams that do not grow when their reader is slow.

    stream = await engine.generate(prompt, params)        raises RequestError if the request is not accepted
    async for event in stream:                            Delta* and one Final; raises RequestError if it fails later
        ...

Leaving the stream early (`aclose`, or the end of `async with stream`) aborts the request.
"""

import asyncio
import hashlib
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from common.config import EngineConfig
from common.errors import ConfigError, RequestError
from common.messages import POOLINGS, EngineReady, EngineStats, Profile
from common.recording import Recorder
from common.sampling_params import SamplingParams
from frontend import request_log
from frontend.connections import Connections
from frontend.core import Core
from frontend.events import Delta, Final, Shortcut
from frontend.large_json import LargeBody
from frontend.model_pooling import ModelPooling
from frontend.pieces import Piece
from frontend.prompt import ChatPrompt, Prompt
from frontend.recording import RecordedCore, RecorderLog
from frontend.request import Request
from frontend.text_work import TextWork
from frontend.tokenizer import Tokenizer

TIMEOUT_LIMIT_S = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Health:
    """Whether the engine serves: `starting`, `serving`, `restarting`, `draining` or `dead`.

    Attributes:
        detail: for `restarting` and `dead` why.
        restarts: how often a lost process has been started again.
    """

    state: str
    detail: str = ""
    restarts: int = 0

    @property
    def ok(self) -> bool:
        """Whether new requests are taken and run at once."""
        return self.state == "serving"


class RequestStream:
    """The events of one request, as an asynchronous iterator: `Delta` objects, then one `Final`.

    For a reader that is slower than the engine, whatever has come in the meantime is merged into one delta per sample,
    so what waits here is never more than the request's own output.

    Attributes:
        request: what the core knows of it.
        shortcuts: for each sample, what may take new text while the reader waits; text that it does not take comes
            through the iteration. For readers that need nothing but the text of deltas.

    Raises:
        RequestError: from the iteration, if the request fails after it was accepted.
    """

    def __init__(self, engine: "Engine") -> None:
        self.request: Request
        self.shortcuts: Sequence[Shortcut] = ()
        self._engine = engine
        self._waiting: dict[int, Delta] = {}
        self._final: Final | None = None
        self._error: RequestError | None = None
        self._ended = False
        self._wake: asyncio.Future[None] | None = None
        self._is_awaited = False  # the reader has handled everything so far and waits for more

    @property
    def prompt_token_ids(self) -> "array[int]":
        """The prompt as it went into the model, int32."""
        return self.request.prompt_token_ids

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> Delta | Final:
        while True:
            if self._waiting:
                return self._waiting.pop(next(iter(self._waiting)))
            if self._ended:
                raise StopAsyncIteration
            if self._error is not None:
                self._ended = True
                raise self._error
            if self._final is not None:
                self._ended = True
                return self._final
            self._wake = asyncio.get_running_loop().create_future()
            self._set_awaited(True)
            try:
                await self._wake
            finally:
                self._set_awaited(False)

    async def final(self) -> Final:
        """Skip the deltas and wait for the end."""
        async with self:
            async for event in self:
                if isinstance(event, Final):
                    return event
        raise RuntimeError("the request's end was taken before")

    def abort(self) -> None:
        """End the request; its `Final` follows with what there is. Does nothing if it has ended."""
        self._engine.core.abort(self.request.request_id)

    async def aclose(self) -> None:
        """Abort the request if it is still running, and read no more of it."""
        self.abort()
        self._waiting.clear()
        self._ended = True

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    # -- called by the core --------------------------------------------------------------------------------------------

    def on_token(self, sample_index: int, piece: Piece) -> None:
        """One more token of a sample."""
        if self._is_awaited and self.shortcuts and self.shortcuts[sample_index].take(piece.text):
            return
        waiting = self._waiting.get(sample_index)
        if waiting is None:
            self._waiting[sample_index] = Delta(sample_index, piece.text, array("i", (piece.token_id,)))
        else:
            waiting.text += piece.text
            waiting.token_ids.append(piece.token_id)
        self._awake()

    def on_delta(self, delta: Delta) -> None:
        """New output of a sample."""
        has_shortcut = self._is_awaited and self.shortcuts and delta.finish_reason is None
        if has_shortcut and self.shortcuts[delta.sample_index].take(delta.text):
            return
        waiting = self._waiting.get(delta.sample_index)
        if waiting is None:
            self._waiting[delta.sample_index] = delta
        else:
            waiting.extend(delta.text, delta.token_ids, delta.logprobs)
            waiting.finish_reason, waiting.stop_reason = delta.finish_reason, delta.stop_reason
        self._awake()

    def on_final(self, final: Final) -> None:
        """The request ended."""
        self._final = final
        self._awake()

    def on_failed(self, error: RequestError) -> None:
        """The request failed."""
        self._error = error
        self._awake()

    def _set_awaited(self, is_awaited: bool) -> None:
        """The reader waits from now on, or not. The core offers most texts to the shortcuts itself, unless a recorder
        stands between us, which would not see them."""
        if is_awaited == self._is_awaited:
            return
        self._is_awaited = is_awaited
        if self.request.sink is self:
            for sample, shortcut in zip(self.request.samples, self.shortcuts, strict=False):
                sample.shortcut = shortcut if is_awaited else None

    def _awake(self) -> None:
        self._set_awaited(False)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Engine:
    """The engine behind one object: prompts are encoded, requests submitted to the core, events streamed.

    Args:
        config: the configuration.
        tokenizer: the model's.
        send: takes a message for the scheduler, and True if the next one follows at once; must not block.
        recorder: records what goes into and comes out of the core.

    Attributes:
        core: the requests' life cycle.
        tokenizer: the model's tokenizer.
        order_profile: asks for a trace of one of the engine's processes; None where there is no supervisor.
        connections: the connected clients, over HTTP and the client socket together.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        send: Callable[..., object],
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.order_profile: Callable[[Profile], None] | None = None
        self.connections = Connections.allowed()
        make_core = Core if recorder is None else partial(RecordedCore, RecorderLog(recorder))
        self.core = make_core(
            tokenizer, send, seed=config.model.seed, stream_interval=config.server.stream_interval,
            session=config.session, held_limit=config.scheduler.max_num_queued_reqs,
        )  # fmt: skip
        self._texts = TextWork(config, tokenizer)
        if config.log.enable_log_requests:
            request_log.attach(self.core)
        self._defaults = sampling_defaults(config, tokenizer)
        self._model_pooling = ModelPooling.read(config.model_dir)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stream: bool = True,
        priority: int = 0,
        client_key: str = "",
        cache_salt: str = "",
        timeout_s: float | None = None,
        name: str = "",
        exact_max_tokens: bool = False,
        add_special_tokens: bool | None = None,
        pooling: str = "",
    ) -> RequestStream:
        """Start a request.

        Args:
            prompt: a text, token ids, or a chat.
            params: see `make_params`.
            stream: whether deltas are wanted; without them the stream yields one `Final`.
            priority, client_key, cache_salt, timeout_s, name, exact_max_tokens, pooling: as in `Core.submit`.
            add_special_tokens: for texts: add BOS as the tokenizer does; by default for texts, not for chats.

        Raises:
            RequestError: it cannot be served.
        """
        self.core.check_serving()
        timings = self.core.arrival()
        token_ids = await self.prompt_ids(prompt, add_special_tokens)
        events = RequestStream(self)
        events.request = self.core.submit(
            token_ids, params, events,
            stream=stream, starts_text=isinstance(prompt, ChatPrompt), priority=priority, client_key=client_key,
            cache_salt=cache_salt, timeout_s=check_timeout(timeout_s), name=name, exact_max_tokens=exact_max_tokens,
            timings=timings, pooling=pooling,
        )  # fmt: skip
        return events

    def check_pooling(self, pooling: str | None) -> str:
        """The pooling of a request for an embedding: its own, else the engine's option, else the model folder's.

        Raises:
            RequestError: an unknown pooling, or the folder asks for one that is not supported.
        """
        if pooling and pooling not in POOLINGS:
            *first, last = (repr(name) for name in POOLINGS if name)
            names = f"{', '.join(first)} or {last}"
            raise RequestError(f"pooling: wanted {names}, got {pooling!r:.80}", param="pooling")
        named = pooling or self.config.model.pooling
        return self._model_pooling.name() if named == "auto" else named

    def make_params(self, values: Mapping[str, Any], *, model_defaults: bool = True, **defaults: Any) -> SamplingParams:
        """Sampling parameters from what a client sent.

        Args:
            values: only what the client named; None is a value.
            model_defaults: fill in the model's own defaults (generation_config.json) for what is missing.
            defaults: an API's defaults, which come after the model's.

        Raises:
            RequestError: an unknown name or a bad value.
        """
        return SamplingParams.from_wire({**defaults, **(self._defaults if model_defaults else {}), **values})

    async def prompt_ids(self, prompt: Prompt, add_special_tokens: bool | None = None) -> "array[int]":
        """The token ids of a prompt in any form, int32.

        Raises:
            RequestError: a chat that the template refuses, ids that are no int32 numbers, or too much text at once.
        """
        if isinstance(prompt, ChatPrompt):
            return await self._texts.encode_chat(prompt, add_special_tokens=bool(add_special_tokens))
        if isinstance(prompt, str):
            return await self._texts.encode(prompt, add_special_tokens=add_special_tokens is not False)
        return _as_ids(prompt)

    def prompt_ids_now(self, prompt: Prompt, add_special_tokens: bool | None = None) -> "array[int] | None":
        """The token ids of a prompt that is encoded at once; None for one that takes longer."""
        if isinstance(prompt, ChatPrompt):
            return None
        if isinstance(prompt, str):
            return self._texts.encode_now(prompt, add_special_tokens=add_special_tokens is not False)
        return _as_ids(prompt)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids.

        Raises:
            RequestError: ids that are not token ids, or too much text at once.
        """
        return await self._texts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def parse(self, body: bytes, id_fields: tuple[str, ...]) -> LargeBody:
        """The values of a large JSON body, see `large_json.parse_large`.

        Raises:
            RequestError: no JSON object, too many values in it, or too much waits already.
        """
        return await self._texts.parse(body, id_fields)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that the model answers to; the first is the one in replies."""
        return self.config.model.served_model_name or (self.config.model_name(),)

    @property
    def name(self) -> str:
        """Names this engine for as long as it runs, however often its processes are started again; empty if a lost
        process ends it."""
        folder = self.config.run_dir.encode()  # no other engine has it
        return hashlib.blake2b(folder, digest_size=8).hexdigest() if self.config.server.restart else ""

    @property
    def limits(self) -> EngineReady | None:
        """The engine's limits, once it is ready."""
        return self.core.limits

    @property
    def stats(self) -> EngineStats:
        """The last figures from the scheduler."""
        return self.core.stats

    def health(self) -> Health:
        """Whether new requests are taken, and if not, why."""
        return Health(self.core.state, self.core.error, self.core.session)

    def close(self) -> None:
        """End threads and processes; work that has not begun is dropped."""
        self._texts.close()


def sampling_defaults(config: EngineConfig, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """What a request's sampling parameters are where it says nothing.

    Raises:
        ConfigError: the model's generation_config.json sets what no request may.
    """
    defaults = tokenizer.sampling_defaults if config.model.generation_config == "auto" else {}
    try:
        SamplingParams.from_wire(dict(defaults))
    except RequestError as error:
        raise ConfigError(
            f"the model's generation_config.json: {error}; start with --generation-config vllm to ignore it"
        ) from None
    return defaults


def check_timeout(timeout_s: float | None) -> float | None:
    """Refuse a timeout that is no positive number of seconds up to a week.

    Raises:
        RequestError: naming `timeout`.
    """
    if timeout_s is not None and not (math.isfinite(timeout_s) and 0 < timeout_s <= TIMEOUT_LIMIT_S):
        raise RequestError(
            f"timeout: wanted seconds above 0 up to {TIMEOUT_LIMIT_S:g}, got {timeout_s!r}", param="timeout"
        )
    return timeout_s


def _as_ids(prompt: Sequence[int]) -> "array[int]":
    if isinstance(prompt, array) and prompt.typecode == "i":
        return prompt
    if any(type(token_id) is not int for token_id in prompt):
        raise RequestError("the prompt: wanted token ids, all integers", param="prompt")
    try:
        return array("i", prompt)
    except OverflowError:
        raise RequestError("the prompt holds a token id outside int32", param="prompt") from None
