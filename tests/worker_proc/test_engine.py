"""What the worker refuses before it loads a model; each refusal is one line."""

from types import SimpleNamespace

import pytest
import torch

from common import processors
from common.config import CacheOptions, EngineConfig, ModelOptions, SchedulerOptions
from common.errors import ConfigError
from kernels.decode_attention import MAX_ROWS
from kernels.paged_kv import MAX_BLOCK_SIZE
from worker_proc import engine
from worker_proc.cuda import engine as cuda_engine

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def refusal(config: EngineConfig, device: torch.device) -> str:
    with pytest.raises(ConfigError) as caught:
        engine.check_options(config, device)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_the_kernels_cannot_take_is_refused_on_a_gpu_only():
    large_blocks = EngineConfig(cache=CacheOptions(block_size=256))
    many_rows = EngineConfig(scheduler=SchedulerOptions(max_num_seqs=2000))
    assert refusal(large_blocks, GPU) == "--block-size is 256; at most 128 are supported on a GPU"
    assert refusal(many_rows, GPU) == "--max-num-seqs is 2000; at most 1024 are supported on a GPU"
    for config in (large_blocks, many_rows):
        engine.check_options(config, CPU)
    assert (engine.KERNEL_MAX_BLOCK_SIZE, engine.KERNEL_MAX_ROWS) == (MAX_BLOCK_SIZE, MAX_ROWS)


def test_options_are_refused_before_the_model_is_read(tmp_path, monkeypatch):
    config = EngineConfig(
        model=ModelOptions(device="cuda"), cache=CacheOptions(block_size=256), model_dir=str(tmp_path / "none")
    )
    monkeypatch.setattr(engine, "choose_device", lambda _: GPU)
    with pytest.raises(ConfigError, match="--block-size is 256"):
        engine.load_engine(config)


def test_threads_are_as_many_as_asked_for_or_as_the_control_group_grants(monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(processors, "usable_cores", lambda: 16)
    monkeypatch.setattr(processors, "granted_cores", lambda: 2.5)
    engine.set_threads(0)
    engine.set_threads(5)
    assert counts == [2, 5]


def test_a_cache_type_is_refused_before_the_weights_are_loaded(tiny_model, monkeypatch):
    _, folder = tiny_model("Llama")
    monkeypatch.setattr(engine, "choose_device", lambda _: GPU)
    monkeypatch.setattr(engine, "device_name", lambda _: "a card")
    monkeypatch.setattr(engine, "set_threads", lambda _: None)
    monkeypatch.setattr(engine, "unfilled_model", lambda *_, **__: pytest.fail("the weights were loaded"))
    config = EngineConfig(cache=CacheOptions(kv_cache_dtype="int8"), model_dir=str(folder))
    with pytest.raises(ConfigError, match="--kv-cache-dtype is int8, .* this model's is 16"):
        engine.load_engine(config)


def test_kernels_are_compiled_while_the_weights_are_loaded(monkeypatch):
    """And the process that compiles them is ended if loading fails; else the start has yet to say when."""
    events = []
    weights = torch.full((2,), float("nan"))
    model = SimpleNamespace(checkpoint_targets=lambda: {"weight": weights})

    class Start:
        def __init__(self, *arguments):
            events.append(("start", float(weights.sum())))

        def finish(self):
            events.append("finish")
            return SimpleNamespace(swap=None), None

    def fill():
        events.append("fill")
        if len(events) > 3:
            raise ConfigError("no such tensor")

    monkeypatch.setattr(cuda_engine, "CudaStart", Start)
    monkeypatch.setattr(engine, "choose_device", lambda _: GPU)
    monkeypatch.setattr(engine, "device_name", lambda _: "a card")
    monkeypatch.setattr(engine, "set_threads", lambda _: None)
    monkeypatch.setattr(engine, "_read_configuration", lambda *_: (None, torch.bfloat16, 10))
    monkeypatch.setattr(engine, "cache_specs", lambda *_: [])
    monkeypatch.setattr(engine, "unfilled_model", lambda *_, **__: (model, fill))
    monkeypatch.setattr(engine, "_engine", lambda *_: "an engine")
    compiler = SimpleNamespace(close=lambda: events.append("close"))
    assert engine.load_engine(EngineConfig(), compiler) == "an engine"
    assert events == [("start", 0.0), "fill", "finish"]
    with pytest.raises(ConfigError, match="no such tensor"):
        engine.load_engine(EngineConfig(), compiler)
    assert events[3:] == [("start", 0.0), "fill", "close"]


def test_without_a_usable_gpu_the_process_that_compiles_is_closed(tiny_model):
    """It is started where there seems to be a GPU, which may have no driver."""
    _, folder = tiny_model("Llama")
    closed = []
    cpu, cache = ModelOptions(device="cpu"), CacheOptions(num_kv_blocks=40)
    config = EngineConfig(model=cpu, cache=cache, model_dir=str(folder))
    engine.load_engine(config, SimpleNamespace(close=lambda: closed.append(True)))
    assert closed == [True]
