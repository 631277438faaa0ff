"""What the worker's part of `check` finds: each class of problem, in the words that loading uses."""

import json
from pathlib import Path

import pytest
import torch

from common.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions, WorkerOptions
from common.errors import ConfigError
from common.findings import OK, PROBLEM, WARNING, Findings
from tests.support import tiny
from tests.support.tiny_gguf import write_gguf
from worker_proc import preflight
from worker_proc.engine import load_engine
from worker_proc.preflight import Card, Preflight

GIB = 1 << 30


def look(folder: Path | str, scratch: Path, *, model=None, **groups) -> Findings:
    options = ModelOptions(**{"model": str(folder), "dtype": "float32", **(model or {})})
    return Preflight(EngineConfig(model=options, **groups), scratch).run()


def text_of(found: Findings, what: str, status: str) -> str:
    [entry] = [entry for entry in found.entries if entry.what == what]
    assert entry.status == status, entry
    return entry.text


def problems(found: Findings) -> list[str]:
    return [entry.what for entry in found.entries if entry.status == PROBLEM]


@pytest.fixture
def folder(tiny_model) -> Path:
    return tiny_model("Qwen3")[1]


@pytest.fixture
def sharded(tiny_model) -> Path:
    reference, folder = tiny_model("Llama")
    (folder / "model.safetensors").unlink()
    reference.save_pretrained(folder, max_shard_size="40KB")
    return folder


@pytest.fixture
def gpu(monkeypatch):
    """gpu(capability=, free=, total=): the check finds such a card."""

    def pretend(capability=(9, 0), free=7 * GIB, total=8 * GIB) -> None:
        monkeypatch.setattr(preflight, "choose_device", lambda _: torch.device("cuda:0"))
        monkeypatch.setattr(preflight, "card_of", lambda _: Card("NVIDIA Pretended", capability, free, total))

    return pretend


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_model_that_can_be_served_is_described_with_what_serving_it_takes(folder, tmp_path):
    found = look(folder, tmp_path, cache=CacheOptions(block_size=8, num_kv_blocks=100))
    assert {entry.status for entry in found.entries} == {OK}, found.entries
    assert text_of(found, "model", OK) == f"Qwen3ForCausalLM, 3 layers, 6 heads, 2 KV heads of 16; {folder}"
    cache = next(entry for entry in found.entries if entry.what == "KV cache")
    token_bytes = 2 * 3 * 2 * 16 * 4
    assert cache.figures == {"block_count": 100, "block_bytes": 8 * token_bytes, "token_count": 800}
    assert cache.text.startswith(f"float32, {token_bytes} bytes a token; 100 blocks of 8, 800 tokens")
    assert text_of(found, "length", OK) == "256 tokens a request, prompt and output"


def test_the_cache_is_the_one_that_serving_makes(folder, tmp_path):
    groups = {"cache": CacheOptions(cpu_kv_cache_bytes=300_000, kv_cache_dtype="int8")}
    [cache] = [entry for entry in look(folder, tmp_path, **groups).entries if entry.what == "KV cache"]
    config = EngineConfig(model=ModelOptions(dtype="float32"), model_dir=str(folder), **groups)
    size = load_engine(config).size
    assert (cache.figures["block_count"], cache.figures["block_bytes"]) == (size.block_count, size.block_bytes)


def test_missing_shards_are_named_by_check_and_by_loading(sharded, tmp_path):
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    shards[-1].unlink()
    text = text_of(look(sharded, tmp_path), "weights", PROBLEM)
    assert text.startswith(
        f"{sharded}: 2 of the {len(shards)} files that model.safetensors.index.json names are missing"
    )
    assert shards[1].name in text and shards[-1].name in text
    with pytest.raises(ConfigError) as caught:
        load_engine(EngineConfig(model_dir=str(sharded)))
    assert str(caught.value) == text


@pytest.mark.parametrize("kind", ["cut off", "another shape", "a tensor less"])
def test_weights_that_loading_would_refuse(kind, folder, tmp_path):
    path = folder / "model.safetensors"
    if kind == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "another shape":
        edit_config(folder, intermediate_size=96)
    else:
        edit_config(folder, num_hidden_layers=4)
    text = text_of(look(folder, tmp_path), "weights", PROBLEM)
    with pytest.raises(ConfigError) as caught:
        load_engine(EngineConfig(model_dir=str(folder)))
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture 'MambaForCausalLM' is not supported; supported: Llama"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised weights ('awq') are not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"head_dim": 0}, "head_dim must be a positive integer"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor must be a positive number, got 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta must be above 1, got -1"),
    ],
)
def test_a_model_that_is_not_supported(changes, text, folder, tmp_path):
    edit_config(folder, **changes)
    found = look(folder, tmp_path)
    assert text in text_of(found, "model", PROBLEM)
    assert problems(found) == ["model"], "what cannot be known without the model is not made up"


def test_lengths_that_do_not_fit(folder, tmp_path):
    few = CacheOptions(num_kv_blocks=4)
    found = look(folder, tmp_path, model={"max_model_len": 100}, cache=few)
    assert "--max-model-len is 100, but the KV cache holds 64 tokens" in text_of(found, "KV cache", PROBLEM)
    found = look(folder, tmp_path, cache=few)
    assert text_of(found, "length", WARNING).startswith("64 tokens a request, prompt and output; the model allows 256")
    found = look(folder, tmp_path, model={"max_model_len": 1000})
    assert text_of(found, "length", WARNING) == "--max-model-len is 1000; the model allows 256, which holds"


def test_a_model_larger_than_memory_is_a_warning_on_a_cpu(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "available_host_bytes", lambda: 1000)
    text = text_of(look(folder, tmp_path, cache=CacheOptions(swap_space_bytes=1 << 20)), "memory", WARNING)
    assert "0.0 MiB are available on this machine" in text


def test_a_cache_type_that_the_gpu_does_not_serve(folder, tmp_path, gpu):
    gpu()
    found = look(folder, tmp_path, cache=CacheOptions(kv_cache_dtype="int8"))
    assert "this model's is 16: use --kv-cache-dtype auto" in text_of(found, "KV cache", PROBLEM)
    edit_config(folder, head_dim=64)
    gpu(capability=(8, 0))
    found = look(folder, tmp_path, model={"load_format": "dummy"}, cache=CacheOptions(kv_cache_dtype="fp8"))
    assert "this GPU's is 8.0: use --kv-cache-dtype int8 or auto" in text_of(found, "KV cache", PROBLEM)
    assert text_of(found, "weights", OK) == "random ones, as --load-format dummy says"


def test_a_gpu_gives_the_cache_its_share_less_the_weights(folder, tmp_path, gpu):
    gpu()
    edit_config(folder, head_dim=64)
    found = look(folder, tmp_path, model={"load_format": "dummy"})
    assert text_of(found, "device", OK) == "NVIDIA Pretended, compute capability 9.0, 7.0 GiB of 8.0 GiB free"
    assert text_of(found, "forward pass", OK) == "fused kernels cover this model"
    assert "up to 4,096 blocks of 16" in text_of(found, "KV cache", OK), "as many as 256 slots of 256 tokens fill"
    gpu(free=GIB)
    found = look(folder, tmp_path, model={"load_format": "dummy"})
    assert "the KV cache gets 0 bytes" in text_of(found, "KV cache", PROBLEM)
    gpu(free=0)
    text = text_of(look(folder, tmp_path), "memory", PROBLEM)
    assert text.endswith("0.0 MiB are free on the GPU; take a smaller model or --dtype bfloat16")


def test_what_a_gpu_does_not_serve(folder, tmp_path, gpu):
    gpu()
    found = look(
        folder, tmp_path, cache=CacheOptions(block_size=256), scheduler=SchedulerOptions(max_num_seqs=2000),
        worker=WorkerOptions(deterministic=True),
    )  # fmt: skip
    assert text_of(found, "limits", PROBLEM) == "--block-size is 256; at most 128 are supported on a GPU"
    assert "--deterministic does not cover this model on a GPU (head_dim 16" in text_of(found, "forward pass", PROBLEM)
    assert "slower, and without CUDA Graphs" in text_of(look(folder, tmp_path), "forward pass", WARNING)
    found = look(folder, tmp_path, cache=CacheOptions(num_kv_blocks=10**7))
    assert "--num-kv-blocks 10000000 takes" in text_of(found, "KV cache", PROBLEM)


def test_too_many_slots_for_the_slots_memory(folder, tmp_path):
    edit_config(folder, max_position_embeddings=1 << 20)
    options = {"model": {"load_format": "dummy"}, "scheduler": SchedulerOptions(max_num_seqs=60_000)}
    found = look(folder, tmp_path, cache=CacheOptions(num_kv_blocks=1 << 17), **options)
    assert "bytes of slot state; at most" in text_of(found, "KV cache", PROBLEM)


def test_a_gpu_that_was_asked_for_and_is_not_there(folder, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("it is there")
    found = look(folder, tmp_path, model={"device": "cuda"})
    assert text_of(found, "device", PROBLEM).startswith("--device is cuda, but this machine has no usable CUDA device")
    assert text_of(found, "weights", OK), "the rest is looked at all the same"


def test_a_model_that_would_be_fetched_is_no_problem_and_is_not_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    found = look("default", tmp_path)
    assert text_of(found, "model", WARNING).startswith("default is yet to be made ready")
    assert found.values == {"model_dir": "", "tokenizer_dir": ""}
    assert [entry.what for entry in found.entries] == ["device", "model"]
    assert "neither a model folder, a .gguf file nor a hub id" in text_of(look("nonsense", tmp_path), "model", PROBLEM)


def test_a_gguf_file_is_looked_at_without_a_trace_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    write_gguf(tiny.save_model(tmp_path / "tiny"), tmp_path / "tiny.gguf")
    found = look(tmp_path / "tiny.gguf", scratch)
    assert problems(found) == []
    assert text_of(found, "model", OK).endswith(f"KV heads of 16; {tmp_path / 'tiny.gguf'}")
    assert Path(found.values["model_dir"]).parent == scratch
    assert not (tmp_path / "cache").exists()


def test_the_vocabulary_is_read_as_the_worker_reads_it(folder, tmp_path):
    (folder / "tokenizer.json").write_text("{}")
    assert "cannot read the vocabulary of" in text_of(look(folder, tmp_path), "vocabulary", PROBLEM)


def test_findings_survive_the_way_to_another_process(folder, tmp_path):
    found = look(folder, tmp_path)
    read = Findings.from_json(found.to_json())
    assert (read.entries, read.values) == (found.entries, found.values)
    with pytest.raises(ConfigError, match="no findings"):
        Findings.from_json("[]")


def test_weights_of_the_hub_that_are_not_all_here_may_be_fetched(sharded, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "find_model", lambda *_, **__: sharded)
    next(sharded.glob("*.safetensors")).unlink()
    found = look("org/name", tmp_path)
    text = text_of(found, "weights", WARNING)
    assert "files that model.safetensors.index.json names are missing" in text
    assert text.endswith("; download the model again (serve fetches what the hub's cache lacks)")
