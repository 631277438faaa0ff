"""Reads the tensors of a GGUF file under the names and in the layout of a Hugging Face checkpoint.

Arrays are numpy: dequantised to float32, or float16/float32 as stored. llama.cpp keeps the query and key rows of the
llama architecture with the two halves of each rotary pair interleaved; they are put back here. Format: the GGUF
specification of the ggml project.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from common.errors import ConfigError

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS_NAME = "rope_freqs.weight"
"""Frequency divisors of Llama 3's scaling; they become part of config.json."""


class GgufFile:
    """A GGUF file: metadata by key, tensors by their Hugging Face name.

    Attributes:
        architecture: `general.architecture`, such as `llama`.
        names: Hugging Face tensor name -> the reader's tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ConfigError(f"cannot read {path} as GGUF: {error}; download or convert it again") from error
        self.architecture = str(self.get("general.architecture", ""))
        self.names = {
            hugging_face_name(tensor.name): tensor for tensor in self.reader.tensors if tensor.name != ROPE_FACTORS_NAME
        }

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value as a Python object."""
        entry = self.reader.fields.get(key)
        return default if entry is None else entry.contents()

    def rope_factors(self) -> list[float] | None:
        """The frequency divisors [head_dim / 2] if the file carries them."""
        for tensor in self.reader.tensors:
            if tensor.name == ROPE_FACTORS_NAME:
                return [float(value) for value in tensor.data]
        return None

    def read(self, name: str) -> np.ndarray:
        """One tensor by its Hugging Face name, in the Hugging Face layout."""
        tensor = self.names[name]
        kept = tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        array = tensor.data if kept else gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if self.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            key = "attention.head_count" if ".q_proj." in name else "attention.head_count_kv"
            head_count = self.get(f"llama.{key}") or self.get("llama.attention.head_count")
            array = deinterleave_rotary_pairs(array, head_count)
        return np.ascontiguousarray(array)

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors, each dequantised when it is yielded."""
        for name in self.names:
            yield name, self.read(name)


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names come back as they are."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{suffix}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{suffix}"
    return gguf_name


def deinterleave_rotary_pairs(array: np.ndarray, head_count: int) -> np.ndarray:
    """Rows of each head from pairs (0, 1), (2, 3) ... to pairs (0, d/2), (1, d/2 + 1) ...; [heads * d, ...]."""
    pairs = array.reshape(head_count, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)
