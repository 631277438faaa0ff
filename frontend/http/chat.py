"""`/v1/chat/completions`: a chat in, the assistant's message out."""

from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response

from frontend.chat.answer import AnswerParser
from frontend.engine import Engine
from frontend.events import Final, Shortcut
from frontend.http import generation
from frontend.http.bodies import read_body
from frontend.http.chat_start import StartedChat, start_chat
from frontend.http.direct import DirectWriter
from frontend.http.errors import JsonResponse
from frontend.http.replies import ChatReply, finals_usage, prompt_fields, usage_dict
from frontend.http.requests import ChatRequest
from frontend.http.streams import EventStream, answer_or_abort


async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    engine: Engine = request.app.state.engine
    body = await read_body(request, ChatRequest)
    chat = await start_chat(engine, request, body)
    reply = ChatReply(
        generation.reply_id("chatcmpl", request, body), chat.model,
        logprob_count=chat.params.logprobs, token_ids=bool(body.return_token_ids),
    )  # fmt: skip
    if body.stream:
        writer = DirectWriter(request.scope)
        return EventStream(_events(reply, chat, body, writer), chat.stream.abort, writer)
    [final] = await answer_or_abort(request.receive, generation.finals([chat.stream]), chat.stream.abort)
    choices = [await reply.choice(sample, chat.form) for sample in final.samples]
    return JsonResponse(reply.whole(choices, finals_usage([final])) | await prompt_fields(final, reply))


async def _events(reply: ChatReply, chat: StartedChat, body: ChatRequest, writer: DirectWriter) -> AsyncIterator[bytes]:
    with_usage, with_running_usage = generation.wants_usage(body)
    n = chat.params.n
    parsers = [] if chat.form.is_plain else [chat.form.parser() for _ in range(n)]
    begun = False

    async for _, event in generation.follow([chat.stream]):
        if not begun:
            begun = True
            yield b"".join(reply.role_chunk(index) for index in range(n))
            if reply.is_bare and not with_running_usage:
                chat.stream.shortcuts = [_shortcut(reply, index, writer, parsers) for index in range(n)]
        if isinstance(event, Final):
            if with_usage:
                yield reply.event(None, finals_usage([event]))
            continue
        usage = usage_dict([chat.stream.request.usage()]) if with_running_usage else None
        index = event.sample_index
        if parsers:
            chunk = reply.answer_chunks(index, event, parsers[index], usage)
        else:
            chunk = reply.chunk(index, event, usage)
        if chunk:
            yield chunk


def _shortcut(reply: ChatReply, index: int, writer: DirectWriter, parsers: Sequence[AnswerParser]) -> Shortcut:
    """What takes the tokens of choice `index`."""
    if not parsers:
        return writer.of_texts(*reply.plain_parts(index))
    return writer.of(lambda text: reply.answer_text(index, text, parsers[index]))
