"""Tiny random models with real tokenizers, as complete folders like those from a model hub."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|start|>", "<|end|>")
TEXT = ["The sea, the sea, the open sea, the blue, the fresh, the ever free.", "¿Dónde está? 海は青い 🌊 naïve café"]

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}


def save_tokenizer(folder: Path) -> int:
    """Write a byte-level BPE tokenizer with a chat template; its vocabulary size."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer.get_vocab_size()


def save_model(folder: Path, family: str = "Llama", **overrides: Any) -> Path:
    """Write a complete random model folder: config, weights, tokenizer, generation config.

    Args:
        family: the prefix of the transformers classes: `Llama`, `Qwen3`, `Qwen2`, `Mistral`.
        overrides: configuration values that differ from `SIZES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = save_tokenizer(folder)
    torch.manual_seed(0)
    values = {**SIZES, "vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 1, **overrides}
    config = getattr(transformers, f"{family}Config")(**values)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return folder
