"""`/v1/chat/completions`: a chat in, the assistant's message out."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from frontend.engine import Engine, RequestStream
from frontend.events import Final
from frontend.http import generation
from frontend.http.errors import JsonResponse, not_supported
from frontend.http.prompts import chat_prompt
from frontend.http.replies import ChatReply, finals_usage, usage_dict
from frontend.http.requests import ChatRequest, decode, sampling_values
from frontend.http.streams import EventStream, answer_or_abort


async def chat_completions(request: Request) -> Response:
    """The endpoint."""
    engine: Engine = request.app.state.engine
    body = decode(await request.body(), ChatRequest)
    model = generation.check_model(engine, body.model)
    generation.check_generation(body)
    _check_tools(body)
    prompt = chat_prompt(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    params = engine.make_params(_values(body), max_tokens=None)
    reply = ChatReply(
        generation.reply_id("chatcmpl", request, body), model,
        logprob_count=params.logprobs, token_ids=bool(body.return_token_ids),
    )  # fmt: skip
    streams = await generation.start(engine, request, body, [prompt], params, deltas=bool(body.stream))

    def abort() -> None:
        generation.abort_all(streams)

    if body.stream:
        return EventStream(_events(reply, streams, body, params.n), abort)
    finals = await answer_or_abort(request.receive, generation.finals(streams), abort)
    choices = [reply.choice(sample) for sample in finals[0].samples]
    return JsonResponse(reply.whole(choices, finals_usage(finals)))


async def _events(
    reply: ChatReply, streams: Sequence[RequestStream], body: ChatRequest, n: int
) -> AsyncIterator[bytes]:
    with_usage, with_running_usage = generation.wants_usage(body)
    begun = False
    async for _, event in generation.follow(streams):
        if not begun:
            begun = True
            yield b"".join(reply.role_chunk(index) for index in range(n))
        if isinstance(event, Final):
            if with_usage:
                yield reply.event(None, finals_usage([event]))
            continue
        usage = usage_dict([streams[0].request.usage()]) if with_running_usage else None
        if chunk := reply.chunk(event.sample_index, event, usage):
            yield chunk


def _values(body: ChatRequest) -> dict[str, Any]:
    values = sampling_values(body)
    if body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs only goes with logprobs: true", param="top_logprobs")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    return values


def _check_tools(body: ChatRequest) -> None:
    if body.tools:
        raise not_supported("tools are", "tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise not_supported("tool_choice is", "tool_choice")
    if body.echo:
        raise not_supported("echo of a chat is", "echo")
