"""Sampling parameters: one definition and one validation, whichever way a request comes in.

The HTTP API, the client SDK and `LLM` all build this class; names and meanings are vLLM's. Whatever it accepts, the
scheduler and the worker can carry out. Checks that need the model (vocabulary, context length) are in
`check_for_model`; the frontend calls it before a request goes any further.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from common.errors import RequestError, shown
from common.structured_outputs import StructuredOutputs

SAMPLE_LIMIT = 128
STOP_STRING_LIMIT = 64
STOP_STRING_LENGTH_LIMIT = 4096
TOKEN_LIST_LIMIT = 1024
LOGPROBS_LIMIT = 20
REPETITION_PENALTY_MIN = 0.01
"""Below it, logits divided by it leave the range of float32."""
SEED_MAX = 2**63 - 1
_NUMBER_TYPES = frozenset((bool, float, int, type(None)))
KNOWN_LIMIT = 256
"""Maps of parameters that are remembered with what they stand for."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request.

    Attributes:
        n: how many samples to draw for the prompt.
        temperature: 0 is greedy; ties go to the lowest token id.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this.
        min_p: keep tokens at least this fraction as likely as the likeliest.
        presence_penalty: subtracted from the logit of each token that the output holds.
        frequency_penalty: subtracted once for each time the output holds the token.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output.
        seed: makes the samples reproducible, whatever runs beside them; None draws one.
        max_tokens: tokens to generate at most; None means up to the model's context.
        min_tokens: no end token and no stop token before this many.
        stop: strings that end the output; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: token ids that end the output.
        ignore_eos: the model's own end tokens do not end the output.
        logprobs: log probabilities of the chosen and of this many likeliest tokens; None for none.
        prompt_logprobs: the same for the prompt's tokens.
        logit_bias: token id -> number added to its logit.
        bad_words: strings that the output will not contain.
        allowed_token_ids: the only ids that may be sampled; None for all.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        detokenize: False returns token ids only.
        structured_outputs: the form that the output must have, also as a map; None for any.

    Raises:
        RequestError: a value of the wrong type or out of range; `param` names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_lists()

    def _normalise(self) -> None:
        put = object.__setattr__
        put(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        put(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        put(self, "bad_words", _as_tuple("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        put(self, "logit_bias", _as_bias(self.logit_bias))
        if self.structured_outputs is not None:
            put(self, "structured_outputs", StructuredOutputs.from_any(self.structured_outputs))
        if self.top_k == -1:
            put(self, "top_k", 0)

    def _check_ranges(self) -> None:
        _check_int("n", self.n, 1, SAMPLE_LIMIT)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, REPETITION_PENALTY_MIN, 100.0)
        _check_optional_int("seed", self.seed, -SEED_MAX - 1, SEED_MAX)
        _check_optional_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        _check_optional_int("logprobs", self.logprobs, 0, LOGPROBS_LIMIT)
        _check_optional_int("prompt_logprobs", self.prompt_logprobs, 0, LOGPROBS_LIMIT)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            if type(getattr(self, name)) is not bool:
                raise _wrong(name, "true or false", getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}", param="min_tokens"
            )

    def _check_lists(self) -> None:
        _check_strings("stop", self.stop)
        _check_strings("bad_words", self.bad_words)
        _check_ids("stop_token_ids", self.stop_token_ids)
        _check_ids("logit_bias", tuple(self.logit_bias))
        for bias in self.logit_bias.values():
            _check_float("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: nothing could be sampled", param="allowed_token_ids")

    def with_values(self, **values: Any) -> "SamplingParams":
        """The same but for values that are known to be good, which are not checked."""
        changed = object.__new__(SamplingParams)
        changed.__dict__.update(self.__dict__, **values)
        if values.keys() != {"seed"}:
            changed.__dict__.pop("_known_wire", None)
        return changed

    def check_for_model(self, vocab_size: int) -> None:
        """Refuse token ids that the model does not have.

        Raises:
            RequestError: an id outside [0, vocab_size); `param` names the field.
        """
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise RequestError(
                        f"{name} holds the token id {token_id}; this model's ids are 0 to {vocab_size - 1}", param=name
                    )

    def check_sampleable(self, end_token_ids: Iterable[int], bad_token_ids: Iterable[Sequence[int]]) -> None:
        """Refuse allowed ids of which other parameters leave none.

        Args:
            end_token_ids: ids that end the output.
            bad_token_ids: the token sequences of `bad_words`.

        Raises:
            RequestError: nothing could be sampled.
        """
        if self.allowed_token_ids is None:
            return
        banned = {word[0] for word in bad_token_ids if len(word) == 1}
        if self.min_tokens:
            banned.update(end_token_ids)
        if banned.issuperset(self.allowed_token_ids):
            raise RequestError(
                "bad_words, and min_tokens with the ids that end the output, leave none of allowed_token_ids to sample",
                param="allowed_token_ids",
            )

    def to_wire(self) -> dict[str, Any]:
        """A map of what differs from the defaults, for msgpack."""
        known = self.__dict__.get("_known_wire")
        if known is None:
            known = self._wire_but_seed()
        return {**known, "seed": self.seed} if self.seed is not None else dict(known)

    def _wire_but_seed(self) -> dict[str, Any]:
        """Without the seed, in which alone many requests differ; remembered if it holds nothing but numbers."""
        values = self.__dict__
        wire = {name: _plain(values[name]) for name, default in _DEFAULTS.items() if values[name] != default}
        wire.pop("seed", None)
        if _NUMBER_TYPES.issuperset(map(type, wire.values())):
            values["_known_wire"] = wire
        return wire

    @classmethod
    def from_wire(cls, values: Any) -> "SamplingParams":
        """Build from a received map; every value is checked as if a user had typed it.

        Requests often have the same few numbers but for the seed: these are checked once, and then remembered.

        Raises:
            RequestError: an unknown name, or a value that is refused.
        """
        if not isinstance(values, dict):
            raise RequestError(f"sampling parameters: wanted a map, got {type(values).__name__}")
        key = _numbers_key(values)
        if key is None:
            return cls._checked(values)
        known = _known.get(key)
        if known is None:
            if len(_known) >= KNOWN_LIMIT:
                _known.clear()
            known = _known[key] = cls._checked({**values, "seed": None})
            known.to_wire()  # is remembered with it
        seed = values.get("seed")
        if seed is None:
            return known
        _check_int("seed", seed, -SEED_MAX - 1, SEED_MAX)
        return known.with_values(seed=seed)

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> "SamplingParams":
        unknown = [str(name) for name in values if name not in _DEFAULTS]
        if unknown:
            near = difflib.get_close_matches(unknown[0], _DEFAULTS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(f"unknown sampling parameter {unknown[0]!r}{hint}", param=unknown[0])
        return cls(**values)


def _plain(value: Any) -> Any:
    if type(value) in _NUMBER_TYPES:
        return value
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, StructuredOutputs):
        return value.to_wire()
    if isinstance(value, Mapping):  # as pairs: msgpack map keys are strings on our wire
        return [[key, bias] for key, bias in value.items()]
    return value


def _wrong(name: str, wanted: str, got: Any) -> RequestError:
    return RequestError(f"{name}: wanted {wanted}, got {shown(got)}", param=name)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _wrong(name, "a list", value)
    if len(value) > TOKEN_LIST_LIMIT:
        raise RequestError(f"{name}: {len(value)} entries, at most {TOKEN_LIST_LIMIT} are allowed", param=name)
    return tuple(value)


def _as_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        bias = {_as_id(token_id): number for token_id, number in pairs}
    except (TypeError, ValueError):
        raise _wrong("logit_bias", "a map from token ids to numbers", value) from None
    if len(bias) > TOKEN_LIST_LIMIT:
        raise RequestError(
            f"logit_bias: {len(bias)} entries, at most {TOKEN_LIST_LIMIT} are allowed", param="logit_bias"
        )
    return bias


_ID = re.compile("[0-9]{1,20}")


def _as_id(value: Any) -> int:
    # JSON objects have string keys, so the HTTP API sends ids as decimal strings
    if type(value) is int:
        return value
    if isinstance(value, str) and _ID.fullmatch(value):
        return int(value)
    raise TypeError(value)


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise _wrong(name, f"an integer from {low} to {high}", value)


def _check_optional_int(name: str, value: Any, low: int, high: int) -> None:
    if value is not None:
        _check_int(name, value, low, high)


def _check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    good = type(value) in (int, float) and math.isfinite(value) and low <= value <= high
    if not good or (low_open and value == low):
        raise _wrong(name, f"a number {'above' if low_open else 'from'} {low:g} up to {high:g}", value)


def _check_ids(name: str, ids: tuple[Any, ...]) -> None:
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise _wrong(name, "token ids (integers from 0)", token_id)


def _check_strings(name: str, strings: tuple[Any, ...]) -> None:
    if len(strings) > STOP_STRING_LIMIT:
        raise RequestError(f"{name}: {len(strings)} strings, at most {STOP_STRING_LIMIT} are allowed", param=name)
    for text in strings:
        if not isinstance(text, str) or not 0 < len(text) <= STOP_STRING_LENGTH_LIMIT:
            raise _wrong(name, f"strings of 1 to {STOP_STRING_LENGTH_LIMIT} characters", text)


_DEFAULTS: dict[str, Any] = {
    item.name: item.default_factory() if callable(item.default_factory) else item.default
    for item in fields(SamplingParams)
}


_known: dict[tuple[Any, ...], SamplingParams] = {}


def _numbers_key(values: dict[str, Any]) -> tuple[Any, ...] | None:
    """What tells maps of numbers apart, whatever their seeds; None for one that holds other values too."""
    entries = [(name, type(value), value) for name, value in values.items() if name != "seed"]  # True is no 1
    return tuple(entries) if _NUMBER_TYPES.issuperset([kind for _, kind, _ in entries]) else None


_MASK64 = 2**64 - 1


def sample_seed(seed: int, sample_index: int) -> int:
    """The 64-bit seed of one of a request's n samples: splitmix64 (Steele et al. 2014) of seed and index.

    Two samples of one request differ, and the same request gives the same set again.
    """
    state = (seed + (sample_index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)
