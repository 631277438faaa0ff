"""Tiny random models saved by transformers, with norms and biases that are not the identity."""

from pathlib import Path

import pytest
import torch
import transformers

TINY = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture
def tiny_model(tmp_path):
    """make(family, **overrides) -> (the transformers model in float32, the folder it is saved in)."""

    def make(family: str, **overrides) -> tuple[transformers.PreTrainedModel, Path]:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**{**TINY, "tie_word_embeddings": False, **overrides})
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight") or name.endswith(".bias"):
                    parameter.uniform_(0.5, 1.5)
        model.save_pretrained(tmp_path)
        return model, tmp_path

    return make
