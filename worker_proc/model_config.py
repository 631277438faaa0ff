"""A model's architecture and sizes, read from the Hugging Face `config.json` beside its weights.

`read_model_config` gives a frozen, validated `ModelConfig`; nothing later looks at the JSON again. What this engine
does not support is refused here, with one line that names what it does support. Knows no torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, shown
from common.model_files import read_object
from common.wire import INT32_MAX

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
BASE_ARCHITECTURES = {name.replace("ForCausalLM", "Model"): name for name in SUPPORTED_ARCHITECTURES}
"""The same without the head, as embedding models are often saved; it is the embedding table, where the two are tied."""
LAYER_LIMIT = 2048
"""Layers that a model may have: each is a few objects before anything of it is looked at."""
LEAST_SCALE, MOST_SCALE = 1e-6, INT32_MAX
"""Between these is what scales a rotary embedding, so that float32 holds whatever is computed of it."""
LEAST_EPS = 1e-30
"""Less is zero in float32, or nearly, and a row of zeros would be divided by it."""
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
        factor = max(1.0, self.rope.factor or 1.0)
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
    layer_count = fields.integer("num_hidden_layers", most=LAYER_LIMIT)
    max_position_embeddings = fields.integer("max_position_embeddings")
    attention_bias = fields.flag("attention_bias")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=fields.integer("num_key_value_heads", default=head_count),
        head_dim=_head_dim(fields, architecture, hidden_size, head_count),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0, least=LEAST_EPS),
        max_position_embeddings=max_position_embeddings,
        rope=_rope_config(fields, max_position_embeddings),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        output_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
        sliding_windows=_sliding_windows(fields, architecture, layer_count),
        dtype=_dtype_name(raw),
    )
    _validate(config, fields)
    return config


class _Fields:
    """Typed access to the JSON with errors that name the file and the key; null counts as missing."""

    def __init__(self, raw: dict[str, Any], source: str, section: str = "") -> None:
        self.raw, self.source, self._section = raw, source, section

    def integer(self, key: str, default: int | None = None, most: int = INT32_MAX) -> int:
        value = self.value(key, default)
        if type(value) is not int or value < 1:
            raise self._wrong(key, "a positive integer", value)
        if value > most:
            raise self._wrong(key, f"at most {most}", value)
        return value

    def number(
        self, key: str, default: Any = None, *, above: float = -math.inf, least: float = -math.inf,
        most: float = math.inf,
    ) -> Any:  # fmt: skip
        """A finite number in a range; JSON as Python reads it may hold others, and the model would compute nothing."""
        value = self.value(key, default)
        if value is None:
            return None
        if not _is_finite(value):
            raise self._wrong(key, "a finite number", value)
        if value <= above:
            raise self._wrong(key, "a positive number" if above == 0 else f"above {above:g}", value)
        if not least <= value <= most:
            raise self._wrong(key, f"at least {least:g}" if value < least else f"at most {most}", value)
        return value

    def scale(self, key: str, default: Any = None, *, above: float = 0) -> Any:
        """A positive number that is neither tiny nor huge."""
        return self.number(key, default, above=above, least=LEAST_SCALE, most=MOST_SCALE)

    def scales(self, key: str) -> tuple[float, ...]:
        """Several of these."""
        value = self.value(key, [])
        if not isinstance(value, list) or not all(map(_is_finite, value)):
            raise self._wrong(key, "a list of finite numbers", value)
        if any(number <= 0 for number in value):
            raise self._wrong(key, "a list of positive numbers", value)
        if any(not LEAST_SCALE <= number <= MOST_SCALE for number in value):
            raise self._wrong(key, f"a list of numbers from {LEAST_SCALE:g} to {MOST_SCALE}", value)
        return tuple(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def section(self, key: str) -> "_Fields":
        """What lies in an object; nothing where it is missing."""
        value = self.value(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return _Fields(value, self.source, f"{key}.")

    def value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        return default if value is None else value

    def _wrong(self, key: str, wanted: str, value: Any) -> ConfigError:
        return ConfigError(f"{self.source}: {self._section}{key} must be {wanted}, got {shown(value)}")


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer that no float can be
        return False


def _architecture(raw: dict[str, Any], source: str) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if raw.get("tie_word_embeddings"):
        name = BASE_ARCHITECTURES.get(str(name), name)
    if name not in SUPPORTED_ARCHITECTURES:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(f"{source}: architecture {shown(name)} is not supported; supported: {supported}")
    return str(name)


def _head_dim(fields: _Fields, architecture: str, hidden_size: int, head_count: int) -> int:
    if architecture == "Qwen3ForCausalLM":
        return fields.integer("head_dim", default=128)
    if fields.value("head_dim", None) is None and hidden_size % head_count:
        raise ConfigError(
            f"{fields.source}: hidden_size {hidden_size} is not a multiple of num_attention_heads {head_count}, and "
            "there is no head_dim"
        )
    return fields.integer("head_dim", default=hidden_size // head_count)


def _validate(config: ModelConfig, fields: _Fields) -> None:
    raw, source = fields.raw, fields.source
    if config.head_count % config.kv_head_count:
        raise ConfigError(
            f"{source}: num_attention_heads {config.head_count} is not a multiple of "
            f"num_key_value_heads {config.kv_head_count}"
        )
    if config.head_dim % 2:
        raise ConfigError(f"{source}: head_dim must be even for rotary embeddings, got {config.head_dim}")
    activation = fields.value("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{source}: hidden_act {shown(activation)} is not supported; supported: silu")
    if raw.get("quantization_config") is not None:
        method = fields.section("quantization_config").raw.get("quant_method")
        raise ConfigError(
            f"{source}: quantised weights ({shown(method)}) are not supported; use the unquantised model or a GGUF"
        )
    if config.context_limit > INT32_MAX:
        raise ConfigError(f"{source}: the rope factor makes a context of more than {INT32_MAX} tokens")
    if config.rope.rope_type == "dynamic" and config.head_dim == 2:
        raise ConfigError(f"{source}: rope type dynamic needs a head_dim above 2, got 2")
    for name in ("short_factor", "long_factor"):
        factors = getattr(config.rope, name)
        if config.rope.rope_type == "longrope" and len(factors) != config.head_dim // 2:
            raise ConfigError(f"{source}: rope {name} needs {config.head_dim // 2} numbers, got {len(factors)}")


def _dtype_name(raw: dict[str, Any]) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    return None if value is None else str(value).removeprefix("torch.")


def _sliding_windows(fields: _Fields, architecture: str, layer_count: int) -> tuple[int | None, ...]:
    """Per layer; Qwen uses windows only with `use_sliding_window`, and then in the layers that `layer_types` names."""
    is_qwen = architecture.startswith("Qwen")
    has_windows = fields.flag("use_sliding_window") if is_qwen else architecture == "MistralForCausalLM"
    if not has_windows or fields.raw.get("sliding_window", 4096) is None:
        return (None,) * layer_count
    window = fields.integer("sliding_window", 4096)
    if not is_qwen:
        return (window,) * layer_count
    first = fields.number("max_window_layers", 28, least=0)
    default_types = ["sliding_attention" if index >= first else "full_attention" for index in range(layer_count)]
    types = fields.value("layer_types", default_types)
    known = isinstance(types, list) and all(kind in ("sliding_attention", "full_attention") for kind in types)
    if not known or len(types) != layer_count:
        raise ConfigError(f"{fields.source}: layer_types needs {layer_count} of sliding_attention or full_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _rope_config(fields: _Fields, max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_scaling` beside `rope_theta` (before)."""
    rope = fields.section("rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters")
    rope_type = rope.value("rope_type", rope.value("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        supported = ", ".join(SUPPORTED_ROPE_TYPES)
        raise ConfigError(f"{fields.source}: rope type {shown(rope_type)} is not supported; supported: {supported}")
    _refuse_rope_of_layers(rope)
    _require_rope_keys(rope, rope_type)
    theta = fields.number("rope_theta", 10_000.0, above=1)
    name = "original_max_position_embeddings"
    original = rope.number(name, above=1, most=INT32_MAX)
    original = fields.number(name, original, above=1, most=INT32_MAX) or max_position_embeddings
    if original <= 1 and rope_type == "longrope":
        raise ConfigError(f"{fields.source}: rope type longrope needs max_position_embeddings above 1, got {original}")
    factor = rope.scale("factor")
    if factor is None and rope_type in ("yarn", "longrope"):
        factor = max_position_embeddings / original
    low_freq_factor = rope.scale("low_freq_factor")
    beta_slow = rope.scale("beta_slow", 1.0)
    return RopeConfig(
        rope_type=rope_type,
        theta=float(rope.number("rope_theta", theta, above=1)),
        factor=factor,
        attention_factor=rope.scale("attention_factor"),
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0, least=beta_slow, most=MOST_SCALE),
        beta_slow=beta_slow,
        mscale=rope.number("mscale", least=0, most=MOST_SCALE),
        mscale_all_dim=rope.number("mscale_all_dim", least=0, most=MOST_SCALE),
        truncate=rope.flag("truncate", True),
        short_factor=rope.scales("short_factor"),
        long_factor=rope.scales("long_factor"),
        low_freq_factor=low_freq_factor,
        high_freq_factor=rope.scale("high_freq_factor", above=low_freq_factor or 0),
        partial_rotary_factor=_partial_rotary_factor(fields, rope, rope_type),
    )


def _partial_rotary_factor(fields: _Fields, rope: _Fields, rope_type: str) -> float:
    name = "partial_rotary_factor"
    partial = float(rope.number(name, fields.number(name, 1.0, least=0, most=1), least=0, most=1))
    if partial != 1.0 and rope_type != "proportional":
        raise ConfigError(
            f"{fields.source}: partial_rotary_factor {partial} is supported with rope type proportional only"
        )
    return partial


def _refuse_rope_of_layers(rope: _Fields) -> None:
    """An object in the object is the rotary embedding of one kind of layer; only one for all layers is supported."""
    kinds = [key for key, value in rope.raw.items() if isinstance(value, dict)]
    if kinds:
        raise ConfigError(
            f"{rope.source}: rotary embeddings for each kind of layer ({shown(kinds[0])}, ...) are not supported; "
            "supported: one for all layers"
        )


_REQUIRED_ROPE_KEYS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def _require_rope_keys(rope: _Fields, rope_type: str) -> None:
    for key in _REQUIRED_ROPE_KEYS.get(rope_type, ()):
        if rope.raw.get(key) is None:
            raise ConfigError(f"{rope.source}: rope type {rope_type} needs {key!r}")
