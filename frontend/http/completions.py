"""`/v1/completions`: text or token ids in, their continuation out; several prompts at once, echo, log probabilities."""

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from frontend.engine import Engine, RequestStream
from frontend.events import Final, TokenLogprob
from frontend.http import generation
from frontend.http.bodies import read_body
from frontend.http.direct import DirectWriter
from frontend.http.errors import JsonResponse, name_fields, not_supported
from frontend.http.output_form import form_field, structured_outputs
from frontend.http.prompts import completion_prompts
from frontend.http.replies import (
    NO_ECHO,
    CompletionReply,
    Echo,
    ShownToken,
    finals_usage,
    prompt_fields,
    usage_dict,
)
from frontend.http.requests import CompletionRequest, sampling_values
from frontend.http.streams import EventStream, answer_or_abort
from frontend.prompt import Prompt
from frontend.prompt_logprobs import in_turns


async def completions(request: Request) -> Response:
    """Continue one or several texts."""
    engine: Engine = request.app.state.engine
    body = await read_body(request, CompletionRequest)
    name_fields(request.scope, {"structured_outputs": form_field(body)})
    model = generation.check_model(engine, body.model)
    generation.check_generation(body)
    _check_own(body)
    prompts = completion_prompts(body.prompt)
    params = engine.make_params({**_values(body), "structured_outputs": structured_outputs(body)})
    reply = CompletionReply(
        generation.reply_id("cmpl", request, body), model,
        logprob_count=body.logprobs, token_ids=bool(body.return_token_ids),
    )  # fmt: skip
    streams = await generation.start(engine, request, body, prompts, params, deltas=bool(body.stream))

    def abort() -> None:
        generation.abort_all(streams)

    if body.stream:
        writer = DirectWriter(request.scope)
        return EventStream(_events(engine, reply, prompts, streams, body, writer), abort, writer)
    finals = await answer_or_abort(request.receive, generation.finals(streams), abort)
    wanted = body.max_tokens != 0
    choices: list[dict[str, Any]] = []
    for prompt, final in zip(prompts, finals, strict=True):
        echo = NO_ECHO
        if body.echo:
            echo = await _echo(engine, reply, prompt, final.prompt_token_ids, final.prompt_logprobs)
        fields = await prompt_fields(final, reply, logprobs_wanted=body.prompt_logprobs is not None)
        for sample in final.samples:
            choice = await reply.choice(len(choices), sample, echo, output_wanted=wanted)
            choices.append(choice | fields)
    return JsonResponse(reply.whole(choices, finals_usage(finals, output_wanted=wanted)))


async def _events(
    engine: Engine,
    reply: CompletionReply,
    prompts: Sequence[Prompt],
    streams: Sequence[RequestStream],
    body: CompletionRequest,
    writer: DirectWriter,
) -> AsyncIterator[bytes]:
    with_usage, with_running_usage = generation.wants_usage(body)
    n = body.n or 1
    is_direct = len(streams) == 1 and reply.is_bare and not with_running_usage and body.max_tokens != 0
    echoed = set()
    finals = []
    async for at, event in generation.follow(streams):
        request = streams[at].request
        if body.echo and at not in echoed:
            echoed.add(at)
            echo = await _echo(engine, reply, prompts[at], request.prompt_token_ids, request.prompt_logprobs)
            yield b"".join(reply.echo_chunk(at * n + index, echo) for index in range(n))
        if is_direct and not streams[0].shortcuts:
            streams[0].shortcuts = [writer.of_texts(*reply.plain_parts(index)) for index in range(n)]
        if isinstance(event, Final):
            finals.append(event)
            continue
        if body.max_tokens == 0:
            event.text, event.logprobs = "", []
        usage = usage_dict([stream.request.usage() for stream in streams]) if with_running_usage else None
        if chunk := reply.chunk(at * n + event.sample_index, event, usage):
            yield chunk
    if with_usage:
        yield reply.event(None, finals_usage(finals, output_wanted=body.max_tokens != 0))


def _values(body: CompletionRequest) -> dict[str, Any]:
    values = sampling_values(body)
    if body.logprobs is not None:
        values["logprobs"] = body.logprobs
        if body.echo:
            values["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.echo and body.max_tokens == 0:
        values["max_tokens"] = 1  # the engine always samples; `completions` drops it
    return values


def _check_own(body: CompletionRequest) -> None:
    if body.suffix:
        raise not_supported("suffix is", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise not_supported("best_of other than n is", "best_of")
    if body.logprobs is not None and body.logprobs < 0:
        raise RequestError(f"logprobs: wanted 0 or more, got {body.logprobs}", param="logprobs")


async def _echo(
    engine: Engine,
    reply: CompletionReply,
    prompt: Prompt,
    token_ids: Sequence[int],
    logprobs: Iterable[TokenLogprob | None] | None,
) -> Echo:
    """The prompt as text, and as tokens whose texts join to it."""
    detokenizer = engine.tokenizer.detokenizer(skip_special_tokens=False)

    def shown() -> Iterator[ShownToken]:
        last = len(token_ids) - 1
        for at, (token_id, entry) in enumerate(zip(token_ids, logprobs or repeat(None), strict=False)):
            text = detokenizer.push(token_id)
            yield reply.shown(text + detokenizer.finish() if at == last else text, entry)

    tokens = await in_turns(shown())
    if isinstance(prompt, str) and "".join(text for text, _, _ in tokens[1:]) == prompt:
        tokens[0] = ("", None, None)  # the tokenizer's own BOS is no part of the prompt's text
    return Echo("".join(text for text, _, _ in tokens), tuple(tokens))
