"""`/tokenize` and `/detokenize`: token ids of a text or a chat, and back. Long lists are handled in pieces."""

import asyncio
from array import array
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from frontend.chat.tools import Tools
from frontend.engine import Engine
from frontend.http.bodies import read_body
from frontend.http.errors import JsonResponse
from frontend.http.generation import check_model
from frontend.http.prompts import chat_prompt
from frontend.http.requests import DetokenizeRequest, TokenizeRequest

TEXTS_AT_ONCE = 500
IDS_AT_ONCE = 16_384
"""Token ids that are looked at, or written, before other work on the loop gets its turn: half a millisecond."""

_encoder = msgspec.json.Encoder()


async def tokenize(request: Request) -> Response:
    """The token ids of a text or a rendered chat."""
    engine: Engine = request.app.state.engine
    body = await read_body(request, TokenizeRequest)
    check_model(engine, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("wanted either prompt or messages", param="prompt")
    if body.prompt is not None:
        ids = await engine.prompt_ids(body.prompt, body.add_special_tokens)
    else:
        chat = chat_prompt(
            body.messages or [],
            tools=Tools.of(body.tools, None).tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
        )
        ids = await engine.prompt_ids(chat, body.add_special_tokens)
    texts = await _token_texts(engine, ids) if body.return_token_strs else None
    limit = engine.limits.max_model_len if engine.limits else None
    rest = _encoder.encode({"count": len(ids), "max_model_len": limit})
    lists = b',"tokens":%b,"token_strs":%b}' % (
        await _encoded(ids),
        b"null" if texts is None else await _encoded(texts),
    )
    return Response(rest[:-1] + lists, media_type="application/json")


async def _encoded(values: "array[int] | list[str]") -> bytes:
    """A long list as JSON; other work on the loop gets its turn every few thousand values."""
    parts = []
    for start in range(0, len(values), IDS_AT_ONCE):
        parts.append(_encoder.encode(list(values[start : start + IDS_AT_ONCE]))[1:-1])
        await asyncio.sleep(0)
    return b"[%b]" % b",".join(parts)


async def _token_texts(engine: Engine, token_ids: Sequence[int]) -> list[str]:
    """Each token as text; other work on the loop gets its turn every few hundred of them."""
    texts: list[str] = []
    for start in range(0, len(token_ids), TEXTS_AT_ONCE):
        texts += [engine.tokenizer.token_text(token_id) for token_id in token_ids[start : start + TEXTS_AT_ONCE]]
        await asyncio.sleep(0)
    return texts


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    engine: Engine = request.app.state.engine
    body = await read_body(request, DetokenizeRequest)
    check_model(engine, body.model)
    await _check_ids(body.tokens, engine.tokenizer.vocab_size)
    text = await engine.decode(body.tokens)
    return JsonResponse({"prompt": text})


async def _check_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that the tokenizer lacks; other work on the loop gets its turn every few thousand of them."""
    for start in range(0, len(token_ids), IDS_AT_ONCE):
        part = token_ids[start : start + IDS_AT_ONCE]
        low, high = min(part), max(part)
        if low < 0 or high >= vocab_size:
            text = f"tokens holds {low if low < 0 else high}; this model's ids are 0 to {vocab_size - 1}"
            raise RequestError(text, param="tokens")
        await asyncio.sleep(0)
