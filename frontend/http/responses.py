"""`/v1/responses`: OpenAI's newer form of a chat, with the same start and parsers as the others.

Nothing is stored, so there is no `previous_response_id`: send the whole conversation as `input`.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from frontend.engine import Engine
from frontend.events import Final
from frontend.http import generation
from frontend.http.bodies import read_body
from frontend.http.chat_start import StartedChat, start_chat
from frontend.http.direct import DirectWriter
from frontend.http.errors import JsonResponse, not_supported
from frontend.http.requests import ChatRequest, ResponseFormat
from frontend.http.response_items import Items, ResponseHead
from frontend.http.streams import EventStream, answer_or_abort


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/responses`.

    Attributes:
        input: a text, or items: messages, `function_call`, `function_call_output`.
        model: the name of a model that is served here.
        instructions: a system message to begin with.
        max_output_tokens: most tokens to generate; by default up to the model's context.
        tools: functions that the model may call.
        tool_choice: `none`, `auto`, `required`, or a map that names one function.
        parallel_tool_calls: false allows one call at most.
        text: a map whose `format` is the form of the output.
        reasoning: a map whose `effort` is a variable of the chat template; `none` asks for no reasoning.
        chat_template_kwargs: further variables of the chat template.
        stream: answer with server-sent events.
        metadata: comes back in the answer.
        user: who asks, for fair sharing; the address if it is missing.
        previous_response_id, background: not supported: nothing is stored.
        store, truncation, include: taken, and without effect.
        priority: lower goes first; 0 is usual.
        cache_salt: cached prefixes are shared only under the same salt.
        request_id: a name for the request, part of the reply's id.
        timeout: seconds after which the request ends with an error.
    """

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    user: str | None = None
    truncation: str | None = None
    include: list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None


_FIELD_NAMES = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "structured_outputs": "text",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}


async def responses(request: Request) -> Response:
    """Answer a chat in the form of OpenAI's Responses."""
    engine: Engine = request.app.state.engine
    body = await read_body(request, ResponsesRequest)
    given = as_chat(body)
    chat = await start_chat(engine, request, given, _FIELD_NAMES)
    head = ResponseHead(generation.reply_id("resp", request, given), chat.model, _echoed(body, chat))
    if body.stream:
        writer = DirectWriter(request.scope)
        return EventStream(_events(head, chat, writer), chat.stream.abort, writer)
    [final] = await answer_or_abort(request.receive, generation.finals([chat.stream]), chat.stream.abort)
    items, parser = Items(head), chat.form.parser()
    sample = final.samples[0]
    items.take([*parser.feed(sample.text), *parser.finish()])
    items.close(sample.finish_reason)
    return JsonResponse(head.whole(items.output, sample.finish_reason, final.usage))


async def _events(head: ResponseHead, chat: StartedChat, writer: DirectWriter) -> AsyncIterator[bytes]:
    items, parser = Items(head), chat.form.parser()
    reason = None
    begun = False
    async for _, event in generation.follow([chat.stream]):
        if not begun:
            begun = True
            yield head.event("response.created", response=head.whole([], None, None))
            yield head.event("response.in_progress", response=head.whole([], None, None))
            chat.stream.shortcuts = [writer.of(lambda text: items.take(parser.feed(text)))]
        if isinstance(event, Final):
            response = head.whole(items.output, reason, event.usage)
            yield head.event(f"response.{response['status']}", response=response)
            continue
        parts = parser.feed(event.text)
        if event.finish_reason:
            parts += parser.finish()
            reason = event.finish_reason
        if events := items.take(parts) + (items.close(event.finish_reason) if event.finish_reason else b""):
            yield events


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request for the chat's start.

    Raises:
        RequestError: something that needs stored responses, or an input of an unknown form.
    """
    for name in ("previous_response_id", "background"):
        if getattr(body, name):
            raise not_supported(f"{name} is", name)
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    given = {"role": "user", "content": body.input} if isinstance(body.input, str) else None
    for index, item in enumerate([given] if given else body.input):
        _add_message(messages, item, f"input[{index}]")
    effort = (body.reasoning or {}).get("effort")
    return ChatRequest(
        messages=messages, model=body.model, stream=body.stream, max_tokens=body.max_output_tokens,
        temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, min_p=body.min_p, seed=body.seed,
        stop=body.stop, tools=[_tool(tool) for tool in body.tools or ()], tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls, response_format=_format((body.text or {}).get("format")),
        reasoning_effort=effort if isinstance(effort, str) else None, chat_template_kwargs=body.chat_template_kwargs,
        user=body.user, priority=body.priority, cache_salt=body.cache_salt, request_id=body.request_id,
        timeout=body.timeout,
    )  # fmt: skip


def _add_message(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """One input item, as a message of its own or as part of the last one."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message" and "role" in item:
        messages.append({"role": item["role"], "content": _content(item.get("content"))})
    elif kind == "function_call" and isinstance(item.get("name"), str):
        function = {"name": item["name"], "arguments": item.get("arguments", "")}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else _content(output)
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": content})
    elif kind != "reasoning":  # earlier reasoning is not shown to the model again
        raise RequestError(f"{where}: wanted a message, a function_call or a function_call_output", param="input")


def _content(content: Any) -> Any:
    """Content parts under the names that chats have."""
    if not isinstance(content, list):
        return content
    texts = ("output_text", "input_text", "text")
    return [
        {"type": "text", "text": part["text"]}
        if isinstance(part, Mapping) and part.get("type") in texts and "text" in part
        else part
        for part in content
    ]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise RequestError(f"tools: only functions can be called here, got {kind!r:.80}", param="tools")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _format(given: Any) -> ResponseFormat | None:
    if not isinstance(given, dict):
        return None
    schema = {"schema": given["schema"]} if "schema" in given else None
    return ResponseFormat(type=str(given.get("type")), json_schema=schema)


def _echoed(body: ResponsesRequest, chat: StartedChat) -> dict[str, Any]:
    """What a response repeats of its request."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "store": False,
        "temperature": chat.params.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": chat.params.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
