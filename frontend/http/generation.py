"""What chat and text completions share: checks that need the engine, starting requests, following several at once."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request

from common.errors import RequestError
from common.sampling_params import SamplingParams
from common.wire import INT32_MAX
from frontend.engine import Engine, RequestStream
from frontend.events import Delta, Final
from frontend.http.requests import GenerationRequest, QueueFields
from frontend.prompt import Prompt

TURN = 16
"""Prompts of one request that are started before other people's tokens get their turn."""
_SALT_LIMIT = 1024
_ID_LIMIT = 128
_FOLLOW_LIMIT = 64  # events that wait when several streams are merged


def check_model(engine: Engine, model: str | None) -> str:
    """The name to reply with.

    Raises:
        RequestError: 404, a model that is not served here.
    """
    if not model or model in engine.model_names:
        return model or engine.model_names[0]
    raise RequestError(
        f"the model {model!r:.120} is not served here; this engine serves {', '.join(engine.model_names)}",
        code="model_not_found", param="model", status=404,
    )  # fmt: skip


def check_queueing(body: QueueFields) -> None:
    """Refuse values that do not fit into the messages to the scheduler; raises RequestError."""
    if body.priority is not None and abs(body.priority) > INT32_MAX:
        raise RequestError(f"priority: wanted an integer from {-INT32_MAX} to {INT32_MAX}", param="priority")
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= _SALT_LIMIT:
        raise RequestError(f"cache_salt: wanted 1 to {_SALT_LIMIT} characters", param="cache_salt")
    if body.request_id is not None and not 0 < len(body.request_id) <= _ID_LIMIT:
        raise RequestError(f"request_id: wanted 1 to {_ID_LIMIT} characters", param="request_id")


def check_generation(body: GenerationRequest) -> None:
    """The same, and refuse options that exclude each other; raises RequestError."""
    check_queueing(body)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options only go with stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs only come in whole replies, not in streams", param="prompt_logprobs")


async def start(
    engine: Engine,
    request: Request,
    body: QueueFields,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    deltas: bool,
    pooling: str = "",
) -> list[RequestStream]:
    """Start one engine request per prompt, telling the scheduler while more follow; if one is refused, the others are
    aborted.

    Raises:
        RequestError: one of them cannot be served.
    """
    streams: list[RequestStream] = []
    batch = object()
    try:
        for number, prompt in enumerate(prompts, 1):
            engine.core.promise(batch, number < len(prompts))
            stream = await engine.generate(
                prompt,
                params,
                stream=deltas,
                priority=body.priority or 0,
                client_key=_client_key(request, body),
                cache_salt=body.cache_salt or "",
                timeout_s=body.timeout,
                name=_name(request, body),
                exact_max_tokens=True,
                add_special_tokens=body.add_special_tokens,
                pooling=pooling,
            )
            streams.append(stream)
            if len(streams) % TURN == 0:
                await asyncio.sleep(0)
    except BaseException:
        engine.core.promise(batch, False)
        abort_all(streams)
        raise
    return streams


def abort_all(streams: Sequence[RequestStream]) -> None:
    """Abort the requests that are still running; their `Final`s follow."""
    for stream in streams:
        stream.abort()


async def finals(streams: Sequence[RequestStream]) -> list[Final]:
    """Wait for all; if one fails, the others are aborted.

    Raises:
        RequestError: the first failure.
    """
    try:
        return list(await asyncio.gather(*(stream.final() for stream in streams)))
    finally:
        abort_all(streams)


async def follow(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, Delta | Final]]:
    """The events of all streams as they come, each with its stream's index; raises RequestError if one fails."""
    try:
        if len(streams) == 1:
            async for event in streams[0]:
                yield 0, event
            return
        async for indexed in _merged(streams):
            yield indexed
    finally:
        abort_all(streams)


async def _merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, Delta | Final]]:
    queue: asyncio.Queue[tuple[int, Delta | Final] | RequestError | None] = asyncio.Queue(_FOLLOW_LIMIT)

    async def pump(index: int, stream: RequestStream) -> None:
        """A stream's events, then None or what ended it; a cancelled pump waits for no place in a full queue."""
        try:
            async for event in stream:
                await queue.put((index, event))
        except RequestError as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        open_count = len(tasks)
        while open_count:
            entry = await queue.get()
            if isinstance(entry, RequestError):
                raise entry
            if entry is None:
                open_count -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def wants_usage(body: GenerationRequest) -> tuple[bool, bool]:
    """Whether the stream ends with a usage chunk, and whether every chunk carries one."""
    options = body.stream_options
    return (
        bool(options and options.include_usage),
        bool(options and options.include_usage and options.continuous_usage_stats),
    )


def reply_id(prefix: str, request: Request, body: GenerationRequest) -> str:
    """The `id` of a reply: the client's own, or that of the HTTP request."""
    return f"{prefix}-{_name(request, body)}"


def _name(request: Request, body: QueueFields) -> str:
    """The request's name: the client's own for it, or the id of the HTTP request."""
    return body.request_id or str(request.scope.get("request_id", ""))


def _client_key(request: Request, body: QueueFields) -> str:
    peer = request.client.host if request.client else ""
    return (body.user or peer)[:256]
