"""Rotary position embeddings, with every frequency scaling that the supported models are published with.

The angles of a step are computed once for all layers, in float32, straight from the positions: there is no table to
size, and positions of any length have their exact angle. Formulas: RoPE arXiv:2104.09864; YaRN arXiv:2309.00071;
LongRoPE arXiv:2402.13753; dynamic NTK and llama3 as in the published model configurations.
"""

import contextlib
import math
from dataclasses import dataclass

import torch

from worker_proc.model_config import ModelConfig, RopeConfig

_CPU = torch.device("cpu")
"""Where a model on `meta` has its frequencies computed: arithmetic there makes torch import its compiler, a second's
work."""


@dataclass
class RotaryAngles:
    """cos and sin of each token's angles, float32 [T, 1, head_dim], multiplied by the attention factor.

    Axis i and i + head_dim/2 form a pair and hold the same cos; `signed_sin` is -sin in the first half and sin in the
    second, so that rotating x is x * cos + roll(x, head_dim/2) * signed_sin.
    """

    cos: torch.Tensor
    signed_sin: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, heads, head_dim] in float32; a new tensor in x's dtype."""
        wide = x.float()
        rolled = wide.roll(x.shape[-1] // 2, -1)
        if wide is x:
            return (wide * self.cos).addcmul_(rolled, self.signed_sin)
        return wide.mul_(self.cos).addcmul_(rolled, self.signed_sin).to(x.dtype)


class RotaryEmbedding:
    """Positions -> angles.

    For `dynamic` and `longrope` the frequencies depend on how long the sequence is when a token is computed: the
    prompt's length, or the token's own position + 1 if that is more. That needs `prompt_lengths` (per token); without
    it, position + 1 is taken. The rule depends on neither chunking, batch nor preemption.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        rope = config.rope
        self.config = rope
        self.head_dim = config.head_dim
        self.max_position_embeddings = config.max_position_embeddings
        self.attention_factor = attention_factor(rope)
        with _CPU if device.type == "meta" else contextlib.nullcontext():
            self.inverse_frequencies = inverse_frequencies(rope, config.head_dim).to(device)
            self.long_frequencies = _longrope_frequencies(rope, config.head_dim, rope.long_factor).to(device)
            self._exponents = _exponents(config.head_dim).to(device)
        two_tables = rope.rope_type == "longrope" and rope.short_factor != rope.long_factor
        self.length_dependent = two_tables or rope.rope_type == "dynamic"

    def angles(self, positions: torch.Tensor, prompt_lengths: torch.Tensor | None = None) -> RotaryAngles:
        """Angles of tokens at `positions` [T]; `prompt_lengths` [T] is the prompt length of each token's sequence."""
        frequencies = self.inverse_frequencies
        if self.length_dependent:
            lengths = positions + 1 if prompt_lengths is None else torch.maximum(positions + 1, prompt_lengths)
            frequencies = self._frequencies_at(lengths)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return RotaryAngles(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))

    def _frequencies_at(self, lengths: torch.Tensor) -> torch.Tensor:
        """Inverse frequencies [T, head_dim / 2] at sequence lengths [T]."""
        if self.config.rope_type == "longrope":
            is_long = lengths > self.config.original_max_position_embeddings
            return torch.where(is_long[:, None], self.long_frequencies, self.inverse_frequencies)
        stretch = lengths.clamp(min=self.max_position_embeddings).float() / self.max_position_embeddings
        growth = self.config.factor * stretch - (self.config.factor - 1)
        base = self.config.theta * growth ** (self.head_dim / (self.head_dim - 2))
        return 1.0 / base[:, None] ** self._exponents


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]; for length-dependent types those of a sequence no longer than the trained length."""
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, head_dim)
    if rope.rope_type == "longrope":
        return _longrope_frequencies(rope, head_dim, rope.short_factor)
    if rope.rope_type == "proportional":
        return _proportional_frequencies(rope, head_dim)
    plain = _plain_frequencies(rope.theta, head_dim)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, plain)
    return plain


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by, so that attention keeps its temperature on longer contexts."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = rope.factor
    if rope.rope_type == "longrope":
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope.original_max_position_embeddings))
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(factor, rope.mscale) / _yarn_scale(factor, rope.mscale_all_dim)
    return _yarn_scale(factor, 1.0)


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _plain_frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / theta ** _exponents(head_dim)


def _proportional_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """The first share of the pairs turns, the others stand still."""
    frequencies = _plain_frequencies(rope.theta, head_dim)
    frequencies[int(rope.partial_rotary_factor * head_dim // 2) :] = 0.0
    return frequencies / (rope.factor or 1.0)


def _longrope_frequencies(rope: RopeConfig, head_dim: int, factors: tuple[float, ...]) -> torch.Tensor:
    if rope.rope_type != "longrope":
        return torch.empty(0)
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * rope.theta ** _exponents(head_dim))


def _llama3_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    rotations = rope.original_max_position_embeddings * plain / (2 * math.pi)
    smooth = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Pairs that turn more than beta_fast times over the original length are kept, fewer than beta_slow are divided."""
    original = rope.original_max_position_embeddings

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    plain = _plain_frequencies(rope.theta, head_dim)
    return plain / rope.factor * ramp + plain * (1 - ramp)
