"""GGUF files become model folders: weights, q/k layout, configuration and tokenizer survive the round trip."""

import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from common.errors import ConfigError
from tests.support import tiny
from tests.support.paged import PagedSequences
from tests.support.tiny_gguf import interleave_rotary_pairs, write_gguf
from worker_proc.fetch_model import fetch_model
from worker_proc.loader import load_model
from worker_proc.loader.convert import convert_gguf
from worker_proc.loader.gguf_config import make_config
from worker_proc.loader.gguf_file import GgufFile, deinterleave_rotary_pairs
from worker_proc.loader.gguf_tokenizer import SPLIT_PATTERNS, make_tokenizer, merges_from_scores
from worker_proc.model_config import parse_model_config, read_model_config

CPU = torch.device("cpu")
IDS = [5, 99, 17, 4, 60, 61, 33]


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder, device=CPU, dtype=torch.float32)
    return PagedSequences(model, 1).run_in_chunks(0, IDS, len(IDS))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Llama", {"attention_bias": True, "tie_word_embeddings": False}),
        ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    ],
)
def test_round_trip_gives_the_same_logits(family, overrides, tmp_path, cache):
    folder = tiny.save_model(tmp_path / "original", family, **overrides)
    write_gguf(folder, tmp_path / "tiny.gguf")
    converted = fetch_model(str(tmp_path / "tiny.gguf"))
    assert converted.parent == cache / "models"
    assert torch.equal(logits(converted), logits(folder))
    ours, original = read_model_config(converted), read_model_config(folder)
    assert (ours.rope, ours.head_dim, ours.tie_word_embeddings, ours.rms_norm_eps) == (
        original.rope, original.head_dim, original.tie_word_embeddings, original.rms_norm_eps
    )  # fmt: skip
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [1]
    tokenizers = [transformers.AutoTokenizer.from_pretrained(path) for path in (converted, folder)]
    text = "The sea 🌊 is <|start|>blue<|end|>\n  naïve"
    first, second = (tokenizer(text).input_ids for tokenizer in tokenizers)
    assert first == second
    messages = [{"role": "user", "content": text}]
    first, second = (tokenizer.apply_chat_template(messages, tokenize=False) for tokenizer in tokenizers)
    assert first == second


def test_quantised_file_read_and_converted_give_the_same_exact_values(tmp_path):
    folder = tiny.save_model(
        tmp_path / "original", "Llama", hidden_size=96, intermediate_size=64, num_key_value_heads=6
    )
    write_gguf(folder, tmp_path / "tiny.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "linked", copy_weights=False)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "copied", copy_weights=True)
    assert (tmp_path / "linked" / "model.gguf").is_symlink()
    assert torch.equal(logits(tmp_path / "linked"), logits(tmp_path / "copied"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copied", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(tmp_path / "linked"), expected, atol=1e-4, rtol=1e-5)
    exact = logits(folder)
    assert 0 < (expected - exact).abs().max() < 0.1 * exact.abs().max()


def test_frequency_factors_become_rope_parameters(tmp_path):
    folder = tiny.save_model(tmp_path / "original", "Llama")
    factors = [1.0 + i for i in range(8)]
    write_gguf(folder, tmp_path / "tiny.gguf", factors=factors)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out", copy_weights=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.model.rotary_emb.inv_freq /= torch.tensor(factors)
    with torch.no_grad():
        expected = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(tmp_path / "out"), expected, atol=1e-4, rtol=1e-5)


def test_rotary_pairs_come_back():
    rows = np.arange(24 * 5).reshape(24, 5)
    assert (deinterleave_rotary_pairs(interleave_rotary_pairs(rows, 3), 3) == rows).all()


def test_qwen_text_is_split_as_transformers_splits_it():
    assert SPLIT_PATTERNS["qwen2"] == PRETOKENIZE_REGEX


def test_sentence_piece_file_becomes_a_tokenizer(tmp_path):
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "s",
        "e",
        "a",
        "ea",
        "▁s",
        "▁sea",
    ]
    path = tmp_path / "llama.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [-float(index) for index in range(7, 0, -1)])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 7)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    tokenizer = make_tokenizer(GgufFile(path))
    assert tokenizer.encode("sea sea").tokens == ["<s>", "▁sea", "▁sea"]
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("sea é</s>").ids) == "sea é"


def test_sentence_piece_merges_prefer_the_best_score():
    pieces = {"<unk>": 0, "▁": 1, "a": 2, "b": 3, "ab": 4, "▁a": 5, "▁ab": 6}
    scores = [0.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0]
    merges = merges_from_scores(pieces, scores)
    assert merges == [("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(pieces, merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    assert tokenizer.encode("ab ab").tokens == ["▁ab", "▁ab"]


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", [8, 4], None, True], ids=repr)
def test_metadata_that_is_no_number_is_named(value):
    """A head count of zero, or one for each layer, ended the conversion with an error that named neither."""
    good = {"tokenizer.ggml.tokens": ["a", "b"], "llama.attention.head_count": 4, "llama.embedding_length": 64,
            "llama.feed_forward_length": 128, "llama.block_count": 2, "llama.context_length": 512,
            "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.scaling.type": "linear",
            "llama.rope.scaling.factor": 2.0}  # fmt: skip
    for key in good:
        metadata = good | {key: value}
        file = SimpleNamespace(
            architecture="llama", path="m.gguf", names={}, rope_factors=lambda: None,
            get=lambda name, default=None, metadata=metadata: default if metadata.get(name) is None else metadata[name],
        )  # fmt: skip
        try:
            parse_model_config(make_config(file, "float32"), source="m.gguf")
        except ConfigError as error:
            assert str(error).startswith("m.gguf: ") and str(error).isprintable()
        else:
            assert value == {"tokens": [8, 4], "type": None}.get(key.rpartition(".")[2], 1.5)


def test_files_that_are_not_supported_say_why(tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF but not really")
    with pytest.raises(ConfigError, match="cannot read .*broken.gguf as GGUF"):
        convert_gguf(path, tmp_path / "out", copy_weights=False)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="'mamba' is not supported; supported: llama, qwen2, qwen3"):
        convert_gguf(path, tmp_path / "out", copy_weights=False)
    assert not (tmp_path / "out").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken.gguf"]
