"""What a request must be for this model and engine, and what is filled in where it leaves something open.

Pure functions of the request, the tokenizer and the engine's limits. Called by `core.Core` when a request comes.
"""

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

from common.errors import RequestError
from common.messages import EngineReady
from common.messages.fields import SHORT_IDS_LIMIT
from common.sampling_params import SamplingParams
from frontend.tokenizer import Tokenizer


def check_prompt(prompt_token_ids: "array[int]", limits: EngineReady) -> None:
    """Refuse a prompt that is empty, longer than the engine holds, or has ids that the model lacks.

    Raises:
        RequestError: which of these, with the numbers.
    """
    count = len(prompt_token_ids)
    if not count:
        raise RequestError("the prompt is empty: wanted at least one token", param="prompt")
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    if low < 0 or high >= limits.vocab_size:
        raise RequestError(
            f"the prompt holds the token id {low if low < 0 else high}; this model's ids are 0 to "
            f"{limits.vocab_size - 1}",
            param="prompt",
        )
    if count >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {count} tokens; this engine holds {limits.max_model_len} tokens of prompt and output "
            f"together (--max-model-len)",
            code="context_length_exceeded",
            param="prompt",
        )


def complete(
    params: SamplingParams,
    limits: EngineReady,
    prompt_count: int,
    draw_seed: Callable[[], int],
    *,
    exact_max_tokens: bool,
) -> SamplingParams:
    """The parameters with `max_tokens` and `seed` filled in.

    Args:
        prompt_count: the prompt's tokens.
        draw_seed: gives a seed for a request that brings none.
        exact_max_tokens: refuse a `max_tokens` that the context cannot hold, instead of ending at its end.

    Raises:
        RequestError: parameters that do not fit the model or one another.
    """
    params.check_for_model(limits.vocab_size)
    if params.stop and not params.detokenize:
        raise RequestError("stop strings need detokenize; use stop_token_ids without it", param="stop")
    room = limits.max_model_len - prompt_count
    wanted = params.max_tokens
    if exact_max_tokens and wanted is not None and wanted > room:
        raise RequestError(
            f"the prompt has {prompt_count} tokens and max_tokens is {wanted}; together that is more than the "
            f"{limits.max_model_len} tokens this engine holds (--max-model-len)",
            code="context_length_exceeded",
            param="max_tokens",
        )
    changes: dict[str, Any] = {}
    if wanted is None or wanted > room:
        changes = {"max_tokens": room, "min_tokens": min(params.min_tokens, room)}
    if params.seed is None:
        changes["seed"] = draw_seed()
    return dataclasses.replace(params, **changes) if changes else params


def end_token_ids(params: SamplingParams, tokenizer: Tokenizer, limits: EngineReady) -> set[int]:
    """Without ids that the model lacks: folders name some, and tokens added to a tokenizer may be such."""
    own = () if params.ignore_eos else tokenizer.end_token_ids
    return set(params.stop_token_ids) | {token_id for token_id in own if token_id < limits.vocab_size}


def bad_token_ids(params: SamplingParams, tokenizer: Tokenizer, limits: EngineReady) -> tuple[tuple[int, ...], ...]:
    """Without words that the model cannot sample: they need no ban.

    Raises:
        RequestError: a word is too long.
    """
    if not params.bad_words:
        return ()
    sequences = tokenizer.bad_word_ids(params)
    longest = max(map(len, sequences), default=0)
    if longest > SHORT_IDS_LIMIT:
        raise RequestError(
            f"bad_words: a word may have up to {SHORT_IDS_LIMIT} tokens, one has {longest}", param="bad_words"
        )
    return tuple(word for word in sequences if max(word) < limits.vocab_size)
