"""Checks a request, and fills in what it leaves open, before it goes to the scheduler. Called by the core."""

import random
from array import array
from collections.abc import Sequence
from typing import Any

from common.client_messages import SampleSoFar
from common.errors import RequestError
from common.messages import EngineReady
from common.messages.fields import SHORT_IDS_LIMIT
from common.sampling_params import SamplingParams
from frontend.tokenizer import Tokenizer

EMBEDDING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
"""For requests that want an embedding: the engine samples a token all the same, the cheapest way."""
TAKEN_UP_LIMIT = 1 << 19
"""What a request may go on from: its tokens, counted once and once more for each stop string. The frontend does nothing
else while it reads them, about a quarter of a second (0.4 us each, several times that if a token is a long text)."""


def not_serving(state: str, why: str) -> RequestError:
    """The error (503) for a request that comes in any of the core's states but `serving`.

    Args:
        why: for `restarting` and `dead`.
    """
    reasons = {
        "starting": ("the engine is still starting", "starting", 1000),
        "restarting": (f"the engine is being started again, and many requests wait for it: {why}", "restarting", 1000),
        "draining": ("the engine is shutting down and takes no new requests", "shutting_down", None),
        "dead": (f"the engine is down: {why}", "engine_dead", None),
    }
    message, code, retry_after_ms = reasons[state]
    return RequestError(message, code=code, status=503, retry_after_ms=retry_after_ms)


def check_prompt(prompt_token_ids: "array[int]", limits: EngineReady) -> None:
    """Refuse a prompt that is empty, too long, or holds ids that the model lacks; raises RequestError."""
    count = len(prompt_token_ids)
    if not count:
        raise RequestError("the prompt is empty: wanted at least one token", param="prompt")
    if count >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {count} tokens; {_context(limits)}: the prompt is too long",
            code="context_length_exceeded",
            param="prompt",
        )
    if max(memoryview(prompt_token_ids).cast("B").cast("I")) >= limits.vocab_size:  # ids below 0 are the largest there
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        raise RequestError(
            f"the prompt holds the token id {low if low < 0 else high}; this model's ids are 0 to "
            f"{limits.vocab_size - 1}",
            param="prompt",
        )


def _context(limits: EngineReady) -> str:
    """How much fits, in the words by which client libraries recognise such an error."""
    return (
        f"this model's maximum context length is {limits.max_model_len} tokens of prompt and output together "
        f"(--max-model-len)"
    )


def completed(
    params: SamplingParams,
    limits: EngineReady,
    prompt_count: int,
    seeds: random.Random,
    resumed: Sequence[SampleSoFar] | None,
    *,
    exact: bool,
) -> SamplingParams:
    """The parameters with `max_tokens` and `seed` filled in.

    Args:
        seeds: where the seed comes from, if there is none.
        resumed: what has come of the request before.
        exact: refuse a `max_tokens` that the context cannot hold, instead of ending at its end.

    Raises:
        RequestError: they do not go with this model, with this prompt, or with what has come.
    """
    params.check_for_model(limits.vocab_size)
    if params.stop and not params.detokenize:
        raise RequestError("stop strings need detokenize; use stop_token_ids without it", param="stop")
    room = limits.max_model_len - prompt_count
    wanted = params.max_tokens
    if exact and wanted is not None and wanted > room:
        raise RequestError(
            f"the prompt has {prompt_count} tokens and max_tokens is {wanted}; {_context(limits)}",
            code="context_length_exceeded",
            param="max_tokens",
        )
    changes: dict[str, Any] = {}
    if wanted is None or wanted > room:
        changes = {"max_tokens": room, "min_tokens": min(params.min_tokens, room)}
    if params.seed is None:
        changes["seed"] = seeds.getrandbits(63)
    params = params.with_values(**changes) if changes else params
    if resumed:
        _check_resumed(resumed, params, limits)
    return params


def _check_resumed(samples: Sequence[SampleSoFar], params: SamplingParams, limits: EngineReady) -> None:
    """Refuse what cannot have come of a request with these parameters, and what cannot go on: the log probabilities of
    a prompt are computed before its first token, and were lost. Raises RequestError."""
    if len({sample.index for sample in samples}) != len(samples):
        raise RequestError("samples: an index occurs twice", param="samples")
    for sample in samples:
        what = f"samples: sample {sample.index}"
        if sample.index >= params.n:
            raise RequestError(f"{what}: the request has {params.n} (n)", param="samples")
        if sample.finish_reason not in (None, "stop", "length", "abort"):
            raise RequestError(f"{what} cannot have ended with {sample.finish_reason!r:.80}", param="samples")
        if sample.token_ids and not 0 <= min(sample.token_ids) <= max(sample.token_ids) < limits.vocab_size:
            raise RequestError(f"{what}: this model's ids are 0 to {limits.vocab_size - 1}", param="samples")
        count, most = len(sample.token_ids), params.max_tokens
        if most is not None and count + (sample.finish_reason is None) > most:
            raise RequestError(f"{what}: {count} tokens, where the request may have {most}", param="samples")
    count = sum(len(sample.token_ids) for sample in samples) * (1 + len(params.stop))
    if count > TAKEN_UP_LIMIT:
        text = f"samples: tokens x (1 + stop strings) is {count:,}; the engine goes on from {TAKEN_UP_LIMIT:,} at most"
        raise RequestError(text, code="engine_restarted", param="samples", status=503)
    if params.prompt_logprobs is not None and any(sample.token_ids for sample in samples):
        text = "the prompt's log probabilities were lost with the engine's frontend, after the first tokens had come"
        raise RequestError(text, code="engine_restarted", status=503)


def known_end_token_ids(params: SamplingParams, limits: EngineReady, tokenizer: Tokenizer) -> set[int]:
    """Ids that end the output, without those that the model lacks: a folder or a tokenizer may name such."""
    own = () if params.ignore_eos else tokenizer.end_token_ids
    return set(params.stop_token_ids) | {token_id for token_id in own if token_id < limits.vocab_size}


def known_bad_token_ids(
    params: SamplingParams, limits: EngineReady, tokenizer: Tokenizer
) -> tuple[tuple[int, ...], ...]:
    """The bad words as ids, without those that the model cannot sample: they need no ban. Raises RequestError."""
    if not params.bad_words:
        return ()
    sequences = tokenizer.bad_word_ids(params)
    longest = max(map(len, sequences), default=0)
    if longest > SHORT_IDS_LIMIT:
        raise RequestError(
            f"bad_words: a word may have up to {SHORT_IDS_LIMIT} tokens, one has {longest}", param="bad_words"
        )
    return tuple(word for word in sequences if max(word) < limits.vocab_size)
