"""Starts a chat, for every endpoint that answers chats: its prompt, its parameters, and how to read its answer.

The chat endpoints differ in what they take and send; all of them start here from a `ChatRequest`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from common.errors import RequestError
from common.sampling_params import SamplingParams
from common.structured_outputs import StructuredOutputs
from frontend.chat.answer import AnswerForm, opens_reasoning
from frontend.chat.reasoning import OPEN
from frontend.chat.tool_formats import ToolFormat, call_grammar, format_of
from frontend.chat.tools import Tools
from frontend.engine import Engine, RequestStream
from frontend.http import generation
from frontend.http.errors import name_fields, not_supported
from frontend.http.output_form import form_field, structured_outputs
from frontend.http.prompts import chat_prompt
from frontend.http.requests import ChatRequest, sampling_values
from frontend.prompt import ChatPrompt
from frontend.tokenizer import Tokenizer

_FIELD_NAMES = {"prompt": "messages", "logprobs": "top_logprobs"}
_TAIL_TOKENS = 16
"""So many of a prompt's last tokens hold whatever opens the reasoning."""


@dataclass(frozen=True)
class StartedChat:
    """A chat that the engine has accepted.

    Attributes:
        model: the name to reply with.
        params: how it is sampled.
        form: how its answer is to be read.
    """

    model: str
    stream: RequestStream
    params: SamplingParams
    form: AnswerForm


async def start_chat(
    engine: Engine, request: Request, body: ChatRequest, names: Mapping[str, str] | None = None
) -> StartedChat:
    """Check a chat and submit its request.

    Args:
        names: what the client calls fields of `ChatRequest`, for errors.

    Raises:
        RequestError: it cannot be served.
    """
    name_fields(request.scope, {**_FIELD_NAMES, **_chosen_names(body), **(names or {})})
    model = generation.check_model(engine, body.model)
    generation.check_generation(body)
    tools = Tools.of(body.tools, body.tool_choice)
    wanted = _wanted_output(body, tools, engine.tokenizer)
    form = _answer_form(body, tools, wanted, engine.tokenizer)
    values = {**_values(body), **_special_tokens(body, form, engine.tokenizer), "structured_outputs": wanted}
    params = engine.make_params(values, max_tokens=None)
    prompt = _prompt(body, tools)
    [stream] = await generation.start(engine, request, body, [prompt], params, deltas=bool(body.stream))
    if form.reasons:
        tail = stream.prompt_token_ids[-_TAIL_TOKENS:]
        form = replace(form, opened=opens_reasoning(engine.tokenizer.decode(tail, skip_special_tokens=False)))
    return StartedChat(model, stream, params, form)


def _chosen_names(body: ChatRequest) -> dict[str, str]:
    """Names of fields that have several, as this client knows them."""
    names = {"structured_outputs": form_field(body)}
    return names if body.max_completion_tokens is None else {**names, "max_tokens": "max_completion_tokens"}


def chat_prompt_of(body: ChatRequest) -> ChatPrompt:
    """The prompt that a chat would start with; raises RequestError as `start_chat` does."""
    return _prompt(body, Tools.of(body.tools, body.tool_choice))


def _prompt(body: ChatRequest, tools: Tools) -> ChatPrompt:
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":
            template_kwargs.setdefault("enable_thinking", False)
    return chat_prompt(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=template_kwargs,
        tools=tools.tools,
    )


def _wanted_output(body: ChatRequest, tools: Tools, tokenizer: Tokenizer) -> StructuredOutputs | None:
    """The form of the whole output: the client's own, or that of the calls it requires."""
    wanted = structured_outputs(body)
    if not tools.must_call:
        return wanted
    if wanted is not None:
        raise RequestError("tool_choice: an answer cannot be a call and follow another form too", param="tool_choice")
    form = _tool_format(tools, tokenizer)
    parallel = body.parallel_tool_calls is not False and not tools.is_named
    grammar = call_grammar(
        form, tools.callable_functions(), parallel=parallel, opening_id=tokenizer.special_id_of(form.opening)
    )
    return StructuredOutputs(grammar=grammar)


def _answer_form(body: ChatRequest, tools: Tools, wanted: StructuredOutputs | None, tokenizer: Tokenizer) -> AnswerForm:
    """How the output is to be read."""
    is_free = wanted is None
    has_calls = bool(tools.tools) and (is_free or tools.must_call)
    return AnswerForm(
        reasons=is_free and OPEN in tokenizer.template_text(with_tools=bool(tools.tools)),
        shows_reasoning=body.include_reasoning is not False,
        tool_format=_tool_format(tools, tokenizer) if has_calls else None,
        tool_names=tools.names,
        parallel=body.parallel_tool_calls is not False,
    )


def _tool_format(tools: Tools, tokenizer: Tokenizer) -> ToolFormat:
    return format_of(tokenizer.template_text(with_tools=bool(tools.tools)))


def _special_tokens(body: ChatRequest, form: AnswerForm, tokenizer: Tokenizer) -> dict[str, Any]:
    """The parameter that keeps special tokens in the text, if the answer cannot be parsed without them."""
    tags = [OPEN] if form.reasons else []
    tags += [form.tool_format.opening] if form.tool_format else []
    needed = any(tokenizer.special_id_of(tag) is not None for tag in tags)
    return {"skip_special_tokens": False} if needed and body.skip_special_tokens is None else {}


def _values(body: ChatRequest) -> dict[str, Any]:
    values = sampling_values(body)
    if body.max_completion_tokens is not None:
        values["max_tokens"] = body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs only goes with logprobs: true", param="top_logprobs")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    if body.echo:
        raise not_supported("echo of a chat is", "echo")
    return values
