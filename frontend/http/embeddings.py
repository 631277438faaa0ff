"""`/v1/embeddings`: texts or token ids in, the model's hidden states out, pooled to one normalised vector per input."""

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import RequestError
from common.wire import array_bytes
from frontend.engine import Engine
from frontend.events import Final
from frontend.http import generation
from frontend.http.bodies import read_body
from frontend.http.errors import name_fields
from frontend.http.prompts import completion_prompts
from frontend.http.requests import EmbeddingsRequest
from frontend.http.streams import answer_or_abort
from frontend.request_checks import EMBEDDING_PARAMS

INPUT_LIMIT = 2048
"""Inputs of one request, as many as OpenAI takes."""

_encoder = msgspec.json.Encoder()


async def embeddings(request: Request) -> Response:
    """Embed one or several texts: for each a vector of length 1."""
    engine: Engine = request.app.state.engine
    body = await read_body(request, EmbeddingsRequest)
    name_fields(request.scope, {"prompt": "input"})
    model = generation.check_model(engine, body.model)
    generation.check_queueing(body)
    if body.dimensions is not None and body.dimensions < 1:
        raise RequestError(f"dimensions: wanted 1 or more, got {body.dimensions}", param="dimensions")
    pooling = engine.check_pooling(body.pooling)
    inputs = completion_prompts(body.input, "input", INPUT_LIMIT)
    streams = await generation.start(engine, request, body, inputs, EMBEDDING_PARAMS, deltas=False, pooling=pooling)
    finals = await answer_or_abort(
        request.receive, generation.finals(streams), lambda: generation.abort_all(streams)
    )  # fmt: skip
    return Response(await _body(model, finals, body), media_type="application/json")


async def _body(model: str, finals: Sequence[Final], body: EmbeddingsRequest) -> bytes:
    """The whole body; other work on the loop gets its turn after each embedding."""
    data = []
    for index, final in enumerate(finals):
        entry = {"object": "embedding", "index": index, "embedding": _encoded(_vector(final, body.dimensions), body)}
        data.append(_encoder.encode(entry))
        await asyncio.sleep(0)
    count = sum(final.usage.prompt_tokens for final in finals)
    usage = {"prompt_tokens": count, "total_tokens": count}
    rest = _encoder.encode({"object": "list", "model": model, "usage": usage})
    return rest[:-1] + b',"data":[' + b",".join(data) + b"]}"


def _vector(final: Final, dimensions: int | None) -> "array[float]":
    if final.embedding is None:
        raise RequestError("the request was aborted", code="aborted", status=499)
    return final.embedding if dimensions is None else shortened(final.embedding, dimensions)


def shortened(vector: "array[float]", dimensions: int) -> "array[float]":
    """The first numbers of a vector, made of length 1 again.

    Raises:
        RequestError: there are not so many.
    """
    if dimensions > len(vector):
        raise RequestError(f"dimensions: wanted 1 to {len(vector)}, got {dimensions}", param="dimensions")
    kept = vector[:dimensions]
    length = math.hypot(*kept) or 1.0
    return array("f", [number / length for number in kept])


def _encoded(vector: "array[float]", body: EmbeddingsRequest) -> Any:
    if body.encoding_format == "base64":
        return base64.b64encode(array_bytes(vector)).decode()
    return vector.tolist()
