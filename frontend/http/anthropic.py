"""`/v1/messages` and its `count_tokens`: Anthropic's form of a chat, with the same start and parsers as the others."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from frontend.engine import Engine
from frontend.events import Final, SampleResult
from frontend.http import generation
from frontend.http.anthropic_blocks import Blocks, message_body, stop_fields
from frontend.http.bodies import read_body
from frontend.http.chat_start import StartedChat, chat_prompt_of, start_chat
from frontend.http.direct import DirectWriter
from frontend.http.errors import JsonResponse
from frontend.http.requests import ChatRequest
from frontend.http.streams import EventStream, answer_or_abort


class MessagesRequest(msgspec.Struct, kw_only=True):
    """The body of both endpoints; `max_tokens` is for the first alone.

    Attributes:
        messages: the chat so far; contents are texts or blocks (`text`, `tool_use`, `tool_result`, `thinking`).
        model: the name of a model that is served here.
        max_tokens: most tokens to generate; required by `/v1/messages`.
        system: a system message to begin with.
        stop_sequences: strings that end the output.
        stream: answer with server-sent events.
        tools: functions that the model may call, each with an `input_schema`.
        tool_choice: a map whose `type` is `auto`, `any`, `tool` or `none`.
        thinking: a map; the type `disabled` turns reasoning off.
        metadata: a map; its `user_id` is the user who asks, for fair sharing.
        service_tier: accepted, but without effect.
    """

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


async def messages(request: Request) -> Response:
    """Answer a chat in Anthropic's form."""
    engine: Engine = request.app.state.engine
    body = await read_body(request, MessagesRequest)
    if body.max_tokens is None:
        raise RequestError("max_tokens: wanted an integer from 1", param="max_tokens")
    given = as_chat(body)
    chat = await start_chat(engine, request, given, {"stop": "stop_sequences"})
    message_id = generation.reply_id("msg", request, given)
    if body.stream:
        writer = DirectWriter(request.scope)
        return EventStream(_events(message_id, chat, writer), chat.stream.abort, writer)
    [final] = await answer_or_abort(request.receive, generation.finals([chat.stream]), chat.stream.abort)
    sample = final.samples[0]
    blocks, parser = Blocks(), chat.form.parser()
    blocks.take([*parser.feed(sample.text), *parser.finish()])
    blocks.close()
    body_fields = stop_fields(sample.finish_reason, sample.stop_reason, has_calls=parser.has_calls)
    return JsonResponse(message_body(message_id, chat.model, blocks.content, body_fields, final.usage))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt of such a request."""
    engine: Engine = request.app.state.engine
    body = await read_body(request, MessagesRequest)
    given = as_chat(body)
    generation.check_model(engine, given.model)
    ids = await engine.prompt_ids(chat_prompt_of(given))
    return JsonResponse({"input_tokens": len(ids)})


async def _events(message_id: str, chat: StartedChat, writer: DirectWriter) -> AsyncIterator[bytes]:
    blocks, parser = Blocks(), chat.form.parser()
    ended: SampleResult | None = None
    begun = False
    async for _, event in generation.follow([chat.stream]):
        if not begun:
            begun = True
            usage = chat.stream.request.usage()
            empty = stop_fields(None, None, has_calls=False)
            yield blocks.event("message_start", message=message_body(message_id, chat.model, [], empty, usage))
            chat.stream.shortcuts = [writer.of(lambda text: blocks.take(parser.feed(text)))]
        if isinstance(event, Final):
            ended = event.samples[0]
            delta = stop_fields(ended.finish_reason, ended.stop_reason, has_calls=parser.has_calls)
            yield blocks.event("message_delta", delta=delta, usage={"output_tokens": event.usage.completion_tokens})
            yield blocks.event("message_stop")
            continue
        parts = parser.feed(event.text) + (parser.finish() if event.finish_reason else [])
        if events := blocks.take(parts) + (blocks.close() if event.finish_reason else b""):
            yield events


def as_chat(body: MessagesRequest) -> ChatRequest:
    """The same request for the chat's start.

    Raises:
        RequestError: content or tools of an unknown form.
    """
    chat: list[dict[str, Any]] = []
    if body.system is not None:
        chat.append({"role": "system", "content": body.system})
    for index, message in enumerate(body.messages):
        chat += _messages(message, f"messages[{index}]")
    choice = body.tool_choice or {}
    effort = None if (body.thinking or {}).get("type") != "disabled" else "none"
    return ChatRequest(
        messages=chat, model=body.model, stream=body.stream, max_tokens=body.max_tokens, temperature=body.temperature,
        top_p=body.top_p, top_k=body.top_k, stop=body.stop_sequences, tools=[_tool(tool) for tool in body.tools or ()],
        tool_choice=_tool_choice(choice), parallel_tool_calls=not choice.get("disable_parallel_tool_use", False),
        reasoning_effort=effort, user=str((body.metadata or {}).get("user_id") or "") or None,
    )  # fmt: skip


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message in the chat's form: results of tools become messages of their own."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append({"type": "text", "text": block.get("text")})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": block.get("content")})
        elif kind not in ("thinking", "redacted_thinking"):  # earlier reasoning is not shown to the model again
            raise RequestError(f"{where}.content: this model takes text and tools; got {kind!r:.80}", param="messages")
    if calls:
        return [*results, {"role": role, "content": texts, "tool_calls": calls}]
    return [*results, {"role": role, "content": texts}] if texts or not results else results


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise RequestError("tools: wanted tools with name, description and input_schema", param="tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> str | dict[str, Any] | None:
    match choice.get("type"):
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "auto" | "none" | None as kind:
            return kind
    raise RequestError("tool_choice.type: wanted 'auto', 'any', 'tool' or 'none'", param="tool_choice")
