"""The bodies of requests: one class per endpoint, decoded by msgspec. A bad body is refused with the field's name.

Field names and defaults are OpenAI's, with vLLM's additions. A field that is null counts as not given. Unknown fields
are accepted, and each is logged once. `SamplingParams` checks the ranges of sampling parameters.
"""

import logging
import re
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from common.errors import RequestError
from frontend.large_json import parse_json

_NOT_A_CHOICE = "Invalid enum value "  # how msgspec begins, which does not say what it wants
_FIELD_PATH = re.compile(r"\$\.(\w+)")
REPORTED_AT_ONCE = 32
SHOWN_LIMIT = 300
"""Characters of an error that repeats what a client sent."""
_REPORT_LIMIT = 1000
_STRING = {"type": "string"}

logger = logging.getLogger(__name__)
_reported: set[str] = set()


_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "null"},
        {"type": "array", "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": _STRING}}},
    ]
}
Messages = Annotated[
    list[dict[str, Any]],
    msgspec.Meta(
        extra_json_schema={
            "items": {
                "type": "object",
                "properties": {
                    "role": {
                        **_STRING,
                        "description": "system, developer, user, assistant or tool; or another that the model's chat "
                        "template knows",
                    },
                    "content": _CONTENT,
                    "tool_calls": {"type": "array", "items": {"type": "object"}},
                    "tool_call_id": _STRING,
                },
                "required": ["role"],
            }
        }
    ),
]
"""Chat messages; what they hold is checked where they are used, and only described here. So with tools."""
Tools = Annotated[
    list[dict[str, Any]],
    msgspec.Meta(
        extra_json_schema={
            "items": {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {"name": _STRING, "description": _STRING, "parameters": {"type": "object"}},
                        "required": ["name"],
                    },
                },
                "required": ["type", "function"],
            }
        }
    ),
]


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream.

    Attributes:
        include_usage: end the stream with a chunk that counts its tokens.
        continuous_usage_stats: with it, every chunk counts those so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """The form that the output must have.

    Attributes:
        type: `text`, `json_object`, or `json_schema`.
        json_schema: a map that contains the `schema`.
    """

    type: str
    json_schema: dict[str, Any] | None = None


class QueueFields(msgspec.Struct, kw_only=True):
    """Fields of every request to the model that are not about its output.

    Attributes:
        model: the name of a model that is served here.
        user: the user who asks, for fair sharing; by default the address.
        priority: lower goes first; the default is 0.
        cache_salt: cached prefixes are shared only under the same salt.
        request_id: a name for the request, part of the reply's id.
        timeout: seconds after which the request ends with an error.
        add_special_tokens: put BOS before the prompt as the tokenizer does; by default for texts, not for chats.
    """

    model: str | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    timeout: float | None = None
    add_special_tokens: bool | None = None


class SamplingFields(QueueFields, kw_only=True):
    """The sampling parameters that a body may name, under SamplingParams' names."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None


class GenerationRequest(SamplingFields, kw_only=True):
    """What chat and text completions have in common.

    Attributes:
        stream: answer with server-sent events.
        stream_options: what the events contain besides the output.
        response_format: the form of the output, as OpenAI has it.
        structured_outputs: as vLLM has it: a map with one of `json`, `regex`, `choice`, `grammar`, `json_object`.
        guided_json, guided_regex, guided_choice, guided_grammar: the same under vLLM's older names.
        echo: put the prompt before the output.
        prompt_logprobs: show the log probabilities of the prompt's tokens; not for streams.
        return_token_ids: show token ids beside the text.
    """

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`/v1/completions`.

    Attributes:
        prompt: a text, token ids, or a list of either.
        suffix: not supported yet.
        best_of: must equal `n`; other numbers are not supported yet.
    """

    prompt: str | list[Any]
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`/v1/chat/completions`.

    Attributes:
        messages: the chat so far, each message with `role` and `content`.
        chat_template_kwargs: further variables for the chat template.
        add_generation_prompt: begin an answer; true by default.
        continue_final_message: continue the last message instead of answering it.
        logprobs: show log probabilities of the output's tokens.
        top_logprobs: with `logprobs`, also those of this many likeliest tokens.
        max_completion_tokens: the newer name of `max_tokens`.
        tools: functions that the model may call.
        tool_choice: `none`, `auto`, `required`, or a map that names one function.
        parallel_tool_calls: false allows at most one call.
        reasoning_effort: a variable of the chat template; `none` asks for no reasoning.
        include_reasoning: false leaves the reasoning out of the answer.
        echo: not supported for chats.
    """

    messages: Messages
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class EmbeddingsRequest(QueueFields, kw_only=True):
    """`/v1/embeddings`.

    Attributes:
        input: a text, token ids, or a list of either.
        encoding_format: `float`, or `base64` of little-endian float32 numbers.
        dimensions: keep only this many numbers of each embedding, and normalise it to length 1 again.
        pooling: `last` for the last token's hidden state, `mean` for the mean of all, `cls` for the first one's; by
            default the engine's `--pooling`, or what the model's folder says.
    """

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`/tokenize`: a text or a chat.

    Attributes:
        model: the name of a model that is served here.
        prompt: a text.
        messages, tools, chat_template_kwargs, add_generation_prompt, continue_final_message: a chat, as in
            `/v1/chat/completions`.
        add_special_tokens: put BOS before it as the tokenizer does; by default for texts, not for chats.
        return_token_strs: show each token as text too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """`/abort_request`.

    Attributes:
        request_id: the request's own `request_id` or `x-request-id`, or the `id` of its reply.
        rid: the same under SGLang's name.
        abort_all: all of them instead.
    """

    request_id: str | None = None
    rid: str | None = None
    abort_all: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`/detokenize`: token ids.

    Attributes:
        model: the name of a model that is served here.
        tokens: their ids.
    """

    model: str | None = None
    tokens: list[int]


_SAMPLING_NAMES = [name for name in SamplingFields.__struct_fields__ if name not in QueueFields.__struct_fields__]

T = TypeVar("T", bound=msgspec.Struct)


def decode(body: bytes, kind: type[T]) -> T:
    """A request's body as an object of `kind`.

    Raises:
        RequestError: not JSON, not an object, or a field of the wrong type; `param` names it.
    """
    return checked(parse_json(body), kind)


def checked(values: dict[str, Any], kind: type[T]) -> T:
    """The values of a body as an object of `kind`; raises RequestError as `decode` does."""
    _report_unknown(values, kind)
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise _refusal(str(error), kind) from None


def sampling_values(request: SamplingFields) -> dict[str, Any]:
    """The sampling parameters that a body names."""
    named = {name: getattr(request, name) for name in _SAMPLING_NAMES}
    return {name: value for name, value in named.items() if value is not None}


def _refusal(text: str, kind: type[msgspec.Struct]) -> RequestError:
    what, _, path = text.rpartition(" - at `") if " - at `" in text else (text, "", "")
    what = what if len(what) <= SHOWN_LIMIT else f"{what[:SHOWN_LIMIT]}..."
    match = _FIELD_PATH.match(path)
    missing = re.match(r"Object missing required field `(\w+)`", what)
    param = missing[1] if missing else match[1] if match else None
    where = f"{path.rstrip('`').removeprefix('$.')}: " if match else ""
    if param and what.startswith(_NOT_A_CHOICE):
        what = f"wanted {_choices(kind, param)}, got {what.removeprefix(_NOT_A_CHOICE)}"
    return RequestError(where + what, param=param)


def _choices(kind: type[msgspec.Struct], name: str) -> str:
    """The values that a field takes, which may be None too."""
    hint = get_type_hints(kind)[name]
    literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
    return " or ".join(repr(value) for literal in literals for value in get_args(literal))


def _report_unknown(values: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    unknown = (name for name in values if name not in kind.__struct_fields__ and name not in _reported)
    for name in islice(unknown, REPORTED_AT_ONCE):
        if len(_reported) < _REPORT_LIMIT:
            _reported.add(name)
            logger.warning("ignoring the unknown field %.64r of %s (said once)", name, kind.__name__)
