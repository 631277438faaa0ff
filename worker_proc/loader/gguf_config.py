"""config.json and generation_config.json of a GGUF file, from its metadata."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from common.errors import ConfigError, shown
from worker_proc.loader.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""GGUF architecture -> (class name, model_type) of config.json."""


def make_config(file: GgufFile, dtype: str) -> dict[str, Any]:
    """The contents of config.json. `dtype` is what the weights are stored as. ConfigError for what is not supported."""
    if file.architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{file.path}: GGUF architecture {file.architecture!r} is not supported; supported: {supported}"
        )
    class_name, model_type = ARCHITECTURES[file.architecture]
    window = _value(file, "attention.sliding_window", None)
    if window and file.architecture == "llama":
        class_name, model_type = "MistralForCausalLM", "mistral"
    head_count = _count(file, "attention.head_count")
    hidden_size = _count(file, "embedding_length")
    tokens = file.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ConfigError(f"{file.path}: the metadata's tokenizer.ggml.tokens must be a list, got {shown(tokens)}")
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": len(tokens),
        "hidden_size": hidden_size,
        "intermediate_size": _value(file, "feed_forward_length"),
        "num_hidden_layers": _value(file, "block_count"),
        "num_attention_heads": head_count,
        "num_key_value_heads": _value(file, "attention.head_count_kv", head_count),
        "head_dim": _value(file, "attention.key_length", hidden_size // head_count),
        "hidden_act": "silu",
        "max_position_embeddings": _value(file, "context_length"),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(file),
        "tie_word_embeddings": "lm_head.weight" not in file.names,
        "attention_bias": "model.layers.0.self_attn.o_proj.bias" in file.names,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
        "dtype": dtype,
    }
    return config | ({"sliding_window": window} if window else {})


def make_generation_config(file: GgufFile, sampling: Mapping[str, float]) -> dict[str, Any]:
    """The contents of generation_config.json: the special ids, every id that ends a turn, and sampling parameters."""
    end_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [file.get(f"tokenizer.ggml.{key}") for key in end_keys]
    config = {
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({token_id for token_id in ends if token_id is not None}),
        "pad_token_id": file.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value not in (None, [])} | dict(sampling)


def _value(file: GgufFile, key: str, *default: Any) -> Any:
    value = file.get(f"{file.architecture}.{key}", *default)
    if value is None and not default:
        raise ConfigError(f"{file.path}: the metadata has no {file.architecture}.{key}")
    return value


def _count(file: GgufFile, key: str) -> int:
    value = _value(file, key)
    if type(value) is not int or value < 1:
        raise _wrong(file, key, "a positive integer", value)
    return value


def _number(file: GgufFile, key: str, *default: float) -> float:
    """A float32 as the shortest decimal that means it: 9.999999747378752e-06 -> 1e-05."""
    value = _value(file, key, *default)
    if type(value) not in (int, float):
        raise _wrong(file, key, "a number", value)
    return float(str(np.float32(value)))


def _wrong(file: GgufFile, key: str, wanted: str, value: Any) -> ConfigError:
    text = f"the metadata's {file.architecture}.{key} must be {wanted}, got {shown(value)}"
    return ConfigError(f"{file.path}: {text}")


def _rope_parameters(file: GgufFile) -> dict[str, Any]:
    theta = _number(file, "rope.freq_base", 10_000.0)
    scaling = _value(file, "rope.scaling.type", "none")
    factors = file.rope_factors()
    if factors is not None:  # divisors per frequency, whatever the length: longrope with both lists the same
        original = _value(file, "context_length")
        lists = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
        return {"rope_type": "longrope", "rope_theta": theta, "original_max_position_embeddings": original, **lists}
    if scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    factor = _number(file, "rope.scaling.factor")
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    if scaling == "yarn":
        original = _value(file, "rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ConfigError(f"{file.path}: rope scaling {scaling!r} is not supported; supported: none, linear, yarn")
