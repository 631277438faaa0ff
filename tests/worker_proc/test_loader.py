"""Loading accounts for every tensor: shards, tied tables in every form (fault F8), and errors by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from tests.support.paged import PagedSequences
from worker_proc.layers.linear import cpu_has_bfloat16
from worker_proc.loader import load_model, resolve_dtype
from worker_proc.loader.safetensors_checkpoint import SafetensorsCheckpoint
from worker_proc.model_config import read_model_config

CPU = torch.device("cpu")
IDS = [5, 99, 17, 4, 60, 61]


def load(folder: Path, dtype: torch.dtype = torch.float32, **options):
    return load_model(folder, device=CPU, dtype=dtype, **options)


def logits(folder: Path, **options) -> torch.Tensor:
    return PagedSequences(load(folder, **options), 1).run_in_chunks(0, IDS, len(IDS))


def expected_logits(reference) -> torch.Tensor:
    with torch.no_grad():
        return reference(torch.tensor([IDS])).logits[0]


def edit(folder: Path, change) -> None:
    """Rewrite model.safetensors after `change(tensors)`."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def test_shards_are_read_through_their_index(tiny_model):
    reference, folder = tiny_model("Qwen3")
    (folder / "model.safetensors").unlink()
    reference.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    torch.testing.assert_close(logits(folder), expected_logits(reference), atol=1e-4, rtol=1e-5)


def test_a_checkpoint_of_the_model_without_its_head(tiny_model):
    """Embedding models: transformers' base class saves its tensors without the prefix `model.`."""
    reference, folder = tiny_model("Qwen3", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    torch.testing.assert_close(logits(folder), expected_logits(reference), atol=1e-4, rtol=1e-5)


def test_missing_shard_and_misplaced_tensor_are_named(tiny_model):
    reference, folder = tiny_model("Llama")
    (folder / "model.safetensors").unlink()
    reference.save_pretrained(folder, max_shard_size="40KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    moved = dict.fromkeys(index["weight_map"], shards[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(ConfigError, match=rf"{shards[0]} does not hold .*weight"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / shards[-1]).unlink()
    with pytest.raises(ConfigError, match=rf"1 of the {len(shards)} files .* are missing: {shards[-1]}; download"):
        load(folder)


@pytest.mark.parametrize("file", ["../{0}/model.safetensors", "{1}/model.safetensors", "x/../model.safetensors"])
def test_files_outside_of_the_folder_are_not_opened(file, tiny_model):
    """An index is a stranger's: it may name any file of this machine."""
    _, folder = tiny_model("Llama")
    weight_map = {"model.norm.weight": file.format(folder.name, folder)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"names files outside of the folder: .*model\.safetensors"):
        load(folder)


def test_an_index_of_things_that_are_no_names_is_refused(tmp_path):
    weight_map = {"a": None, "b": [1], "c": "\0", "d": 5, "e": "", "f": "."} | {f"w{n}": f"{n}" for n in range(1000)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=r"1005 of the 1005 files .* are missing") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("kept", ["embedding", "lm_head", "both"])
def test_tied_tables_come_under_either_name(kept, tiny_model):
    reference, folder = tiny_model("Qwen3", tie_word_embeddings=True)
    expected = expected_logits(reference)

    def change(tensors):
        table = tensors.pop("model.embed_tokens.weight")
        if kept != "lm_head":
            tensors["model.embed_tokens.weight"] = table
        if kept != "embedding":
            tensors["lm_head.weight"] = table.clone()

    edit(folder, change)
    torch.testing.assert_close(logits(folder), expected, atol=1e-4, rtol=1e-5)


def test_tables_that_are_said_to_be_tied_but_differ_are_both_used(tiny_model):
    reference, folder = tiny_model("Llama", tie_word_embeddings=True)
    other = torch.randn(131, 48)
    edit(folder, lambda tensors: tensors.update({"lm_head.weight": other}))
    reference.lm_head.weight = torch.nn.Parameter(other)
    torch.testing.assert_close(logits(folder), expected_logits(reference), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "missing lm_head.weight"),
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "missing model.layers.1.self_attn.k_proj.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "unexpected extra"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(80, 47)}),
            r"model.layers.0.mlp.up_proj.weight has shape \[80, 47\], config.json asks for \[80, 48\]",
        ),
        (lambda t: [t.pop(name) for name in list(t) if "layers.2" in name], "missing model.layers.2.* and 5 more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tiny_model):
    _, folder = tiny_model("Llama")
    edit(folder, change)
    with pytest.raises(ConfigError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_precomputed_rotary_buffers_are_ignored(tiny_model):
    _, folder = tiny_model("Llama")
    before = load(folder).state_dict()
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    after = load(folder).state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


def test_folder_without_weights_and_unknown_format_say_what_to_do(tiny_model):
    _, folder = tiny_model("Llama")
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ConfigError, match="cannot read .*model.safetensors"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no .safetensors file"):
        load(folder)
    with pytest.raises(ConfigError, match=r"'pickle' is not supported; supported: auto, safetensors, gguf, dummy"):
        load(folder, load_format="pickle")
    with pytest.raises(ConfigError, match=r"holds 0 \.gguf files"):
        load(folder, load_format="gguf")


def test_dummy_weights_depend_on_the_seed_alone(tiny_model):
    _, folder = tiny_model("Qwen3")
    (folder / "model.safetensors").unlink()
    first, again = (logits(folder, load_format="dummy", seed=3) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.isfinite(first).all()
    assert not torch.equal(first, logits(folder, load_format="dummy", seed=4))


def test_automatic_dtype(tiny_model):
    _, folder = tiny_model("Llama")
    config = read_model_config(folder)
    assert resolve_dtype("auto", config, CPU) == (torch.bfloat16 if cpu_has_bfloat16() else torch.float32)
    assert resolve_dtype("auto", config, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float16", config, CPU) == torch.float16
    with pytest.raises(ConfigError, match="'int3' is not supported; supported: auto, float32, bfloat16, float16"):
        resolve_dtype("int3", config, CPU)


@pytest.mark.skipif(not cpu_has_bfloat16(), reason="weights are packed only on CPUs with bfloat16")
def test_packed_weights_replace_the_plain_ones(tiny_model):
    _, folder = tiny_model("Llama", tie_word_embeddings=True, attention_bias=True)
    model = load(folder, torch.bfloat16)
    attention = model.model.layers[0].self_attn
    assert attention.qkv_proj.weight is None
    assert model.model.embed_tokens.weight is not None
    plain = load_file(folder / "model.safetensors")
    x = torch.randn(3, 48).bfloat16()
    parts = ("q_proj", "k_proj", "v_proj")
    weight = torch.cat([plain[f"model.layers.0.self_attn.{part}.weight"] for part in parts]).bfloat16().float()
    bias = torch.cat([plain[f"model.layers.0.self_attn.{part}.bias"] for part in parts]).bfloat16().float()
    torch.testing.assert_close(attention.qkv_proj(x).float(), x.float() @ weight.T + bias, atol=0.05, rtol=0.02)
