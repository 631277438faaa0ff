"""A model's architecture and sizes, read from the Hugging Face `config.json` beside its weights.

`read_model_config` gives a frozen, validated `ModelConfig`; nothing later looks at the JSON again. What this engine
does not support is refused here, with one line that names what it does support. Knows no torch.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.model_files import read_object

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
BASE_ARCHITECTURES = {name.replace("ForCausalLM", "Model"): name for name in SUPPORTED_ARCHITECTURES}
"""The same without the head, as embedding models are often saved; it is the embedding table, where the two are tied."""
LAYER_LIMIT = 2048
"""Layers that a model may have: each is a few objects before anything of it is looked at."""
SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding; which fields count depends on `rope_type` (see layers/rotary.py).

    original_max_position_embeddings: the length the model was first trained at (yarn, longrope, llama3).
    """

    rope_type: str
    theta: float
    factor: float | None = None
    attention_factor: float | None = None
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only model.

    sliding_windows: per layer the number of tokens a token sees (itself included), or None for all.
    dtype: the dtype the checkpoint declares ("bfloat16", ...), or None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]
    dtype: str | None

    @property
    def context_limit(self) -> int:
        """Tokens a sequence may hold: what the scaling of the rotary embedding was made for, if that is more than
        `max_position_embeddings` (yarn and dynamic configurations often keep the trained length there).
        """
        factor = self.rope.factor or 1.0
        if self.rope.rope_type == "yarn":
            return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * factor))
        return (
            int(self.max_position_embeddings * factor)
            if self.rope.rope_type == "dynamic"
            else self.max_position_embeddings
        )


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read and validate `config.json` of a model folder.

    Raises:
        ConfigError: unreadable file, unknown architecture or rope type, a missing or impossible value.
    """
    path = model_dir / "config.json"
    return parse_model_config(read_object(path), source=str(path))


def parse_model_config(raw: dict[str, Any], *, source: str) -> ModelConfig:
    """As `read_model_config`, from parsed JSON; `source` is the path that error messages name."""
    architecture = _architecture(raw, source)
    fields = _Fields(raw, source)
    head_count = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // head_count
    layer_count = fields.integer("num_hidden_layers", most=LAYER_LIMIT)
    max_position_embeddings = fields.integer("max_position_embeddings")
    attention_bias = bool(raw.get("attention_bias", False))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=fields.integer("num_key_value_heads", default=head_count),
        head_dim=fields.integer("head_dim", default=default_head_dim),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_position_embeddings,
        rope=_rope_config(raw, max_position_embeddings, source),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        sliding_windows=_sliding_windows(raw, architecture, layer_count, source),
        dtype=_dtype_name(raw),
    )
    _validate(config, raw, source)
    return config


class _Fields:
    """Typed access to the JSON with errors that name the file and the key."""

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self.raw, self.source = raw, source

    def integer(self, key: str, default: int | None = None, most: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.source}: {key} must be a positive integer, got {value!r}")
        if most is not None and value > most:
            raise ConfigError(f"{self.source}: {key} must be at most {most}, got {value}")
        return value


def _architecture(raw: dict[str, Any], source: str) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if raw.get("tie_word_embeddings"):
        name = BASE_ARCHITECTURES.get(str(name), name)
    if name not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(f"{source}: architecture {name!r} is not supported; supported: {supported}")
    return str(name)


def _validate(config: ModelConfig, raw: dict[str, Any], source: str) -> None:
    _require_finite(config, "", source)
    _require_finite(config.rope, "rope ", source)
    if config.head_count % config.kv_head_count:
        raise ConfigError(
            f"{source}: num_attention_heads {config.head_count} is not a multiple of "
            f"num_key_value_heads {config.kv_head_count}"
        )
    if config.head_dim % 2:
        raise ConfigError(f"{source}: head_dim must be even for rotary embeddings, got {config.head_dim}")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{source}: hidden_act {activation!r} is not supported; supported: silu")
    if "quantization_config" in raw:
        method = raw["quantization_config"].get("quant_method")
        raise ConfigError(
            f"{source}: quantised weights ({method}) are not supported; use the unquantised model or a GGUF"
        )
    for name in ("short_factor", "long_factor"):
        factors = getattr(config.rope, name)
        if config.rope.rope_type == "longrope" and len(factors) != config.head_dim // 2:
            raise ConfigError(f"{source}: rope {name} needs {config.head_dim // 2} numbers, got {len(factors)}")


def _require_finite(config: ModelConfig | RopeConfig, where: str, source: str) -> None:
    """Refuse NaN and infinity, which JSON as Python reads it may hold: the model would compute nothing else."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{source}: {where}{field.name} must be a finite number, got {number}")


def _dtype_name(raw: dict[str, Any]) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")


def _sliding_windows(raw: dict[str, Any], architecture: str, layer_count: int, source: str) -> tuple[int | None, ...]:
    """Per layer; Qwen uses windows only with `use_sliding_window`, and then in the layers that `layer_types` names."""
    if architecture == "LlamaForCausalLM":
        return (None,) * layer_count
    window = raw.get("sliding_window", 4096)
    if architecture == "MistralForCausalLM" or window is None:
        return (window,) * layer_count
    if not raw.get("use_sliding_window", False):
        return (None,) * layer_count
    first = raw.get("max_window_layers", 28)
    default_types = ["sliding_attention" if index >= first else "full_attention" for index in range(layer_count)]
    types = raw.get("layer_types") or default_types
    if len(types) != layer_count or not set(types) <= {"sliding_attention", "full_attention"}:
        raise ConfigError(f"{source}: layer_types needs {layer_count} of sliding_attention or full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _rope_config(raw: dict[str, Any], max_position_embeddings: int, source: str) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (before)."""
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise ConfigError(f"{source}: rope type {rope_type!r} is not supported; supported: {supported}")
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor")) or 1.0
    if partial != 1.0 and rope_type != "proportional":
        raise ConfigError(f"{source}: partial_rotary_factor {partial} is supported with rope type proportional only")
    _require_rope_keys(parameters, rope_type, source)
    original = raw.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    original = original or max_position_embeddings
    factor = parameters.get("factor")
    if factor is None and rope_type in ("yarn", "longrope"):
        factor = max_position_embeddings / original
    return RopeConfig(
        rope_type=rope_type,
        theta=float(parameters.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        factor=factor,
        attention_factor=parameters.get("attention_factor"),
        original_max_position_embeddings=original,
        beta_fast=parameters.get("beta_fast") or 32.0,
        beta_slow=parameters.get("beta_slow") or 1.0,
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=parameters.get("truncate", True),
        short_factor=tuple(parameters.get("short_factor") or ()),
        long_factor=tuple(parameters.get("long_factor") or ()),
        low_freq_factor=parameters.get("low_freq_factor"),
        high_freq_factor=parameters.get("high_freq_factor"),
        partial_rotary_factor=float(partial),
    )


_REQUIRED_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _require_rope_keys(parameters: dict[str, Any], rope_type: str, source: str) -> None:
    for key in _REQUIRED_ROPE_KEYS.get(rope_type, ()):
        if parameters.get(key) is None:
            raise ConfigError(f"{source}: rope type {rope_type} needs {key!r}")
