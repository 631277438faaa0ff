"""Writes tiny models as GGUF files, the way llama.cpp's converter does."""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

from tests.support import tiny
from worker_proc.loader.gguf_file import LAYER_NAMES, TOP_NAMES, hugging_face_name


def interleave_rotary_pairs(array: np.ndarray, head_count: int) -> np.ndarray:
    """llama.cpp's layout of query and key rows: what its converter does to a llama checkpoint."""
    halves = array.reshape(head_count, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor, found by trying all of them."""
    stems = [*TOP_NAMES, *(f"blk.{layer}.{stem}" for layer in range(4) for stem in LAYER_NAMES)]
    candidates = [f"{stem}.{suffix}" for stem in stems for suffix in ("weight", "bias")]
    return next(candidate for candidate in candidates if hugging_face_name(candidate) == name)


def write_metadata(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig, tokenizer: dict) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)


def write_gguf(
    folder: Path, path: Path, *, quantization: gguf.GGMLQuantizationType | None = None, factors=None
) -> None:
    """Write a Hugging Face folder of a tiny model as GGUF; matrices quantised if asked."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    writer = gguf.GGUFWriter(path, model.config.model_type)
    write_metadata(writer, model.config, json.loads((folder / "tokenizer.json").read_text()))
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if model.config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = model.config.num_attention_heads if ".q_proj." in name else model.config.num_key_value_heads
            array = interleave_rotary_pairs(array, heads)
        if quantization is not None and array.ndim == 2:
            data = gguf.quants.quantize(array, quantization)
            writer.add_tensor(gguf_name(name), data, raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
