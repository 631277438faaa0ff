"""How the GPU worker is put together: sizes and refusals, on a pretended card; models that fall back."""

from types import SimpleNamespace

import pytest
import torch

from common.config import CacheOptions, EngineConfig, SchedulerOptions, StepLimits
from kernels.compile_process import CompileProcess
from kernels.launch import shared_memory_bytes
from worker_proc.cuda import engine
from worker_proc.cuda.buckets import first_buckets, start_buckets
from worker_proc.cuda.covered_models import unsupported_reason
from worker_proc.cuda.fused_forward import FusedForward
from worker_proc.cuda.plain_forward import PlainForward
from worker_proc.kv_cache import SAFETY_BYTES, cache_specs
from worker_proc.loader import load_model

GIB = 1 << 30
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.fixture
def pretended_card(monkeypatch):
    """The card as far as start-up asks it: 8 GiB, 3 of them free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (3 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda *_: None)
    monkeypatch.setattr(engine, "prepare_thread", lambda: None)


@pytest.fixture
def start(tiny_model, pretended_card, library_products):
    """start(options, **model values) -> (runner, size), on the CPU."""

    def make(family="Llama", seqs=2, model_values=None, **groups):
        _, folder = tiny_model(family, **(model_values or {}))
        model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
        config = EngineConfig(scheduler=SchedulerOptions(max_num_seqs=seqs, max_num_batched_tokens=16), **groups)
        specs = cache_specs(model.config, torch.float32, "auto")
        return engine.cuda_runner(config, StepLimits(seqs, 16), model, specs, 131)

    return make


def test_the_cache_gets_what_the_share_leaves(pretended_card):
    in_use = 5 * GIB
    assert engine.available_bytes(0.9, 1000) == int(8 * GIB * 0.9) - in_use - 1000 - SAFETY_BYTES
    assert engine.available_bytes(0.5, 0) == 0


def test_a_small_model_starts_and_every_bucket_runs(start):
    runner, size = start(cache=CacheOptions(num_kv_blocks=40))
    assert size.block_count == 40
    assert runner.mirror.sampling == [None, None], "warming up took a slot"
    assert not runner.slots.known_lengths.any(), "warming up wrote to a slot"


def test_what_start_up_leaves_is_prepared_one_by_one(start, monkeypatch):
    runner, _ = start(seqs=10, cache=CacheOptions(num_kv_blocks=40))
    prepared = []
    monkeypatch.setattr(runner.program, "prepare", prepared.append)
    turns = 1
    while runner.prepare_next():
        turns += 1
    first = len(first_buckets(10, 16))
    assert prepared == start_buckets(10, 16)[first:] and turns == len(prepared) > 1
    assert not runner.prepare_next() and len(prepared) == turns, "nothing is prepared twice"


@pytest.mark.parametrize(("is_on_disk", "noted"), [(True, []), (True, None), (False, []), (False, None)])
def test_kernels_are_listed_and_compiled_only_if_one_is_not_on_disk(is_on_disk, noted, start, monkeypatch):
    """A note says that they are; it may be wrong, and then the process that compiles is started late. Or it is one for
    another card, and what else this one needs is listed."""
    events, load, needed_kernels = [], engine.Trial.load, engine.Trial.needed_kernels

    def list_kernels(trial, buckets):
        events.append(buckets.__name__)
        return needed_kernels(trial, buckets)

    monkeypatch.setattr(engine.Trial, "load", lambda trial, buckets: load(trial, buckets) and is_on_disk)
    monkeypatch.setattr(engine.Trial, "needed_kernels", list_kernels)
    monkeypatch.setattr(CompileProcess, "start", lambda _: events.append("start"))
    monkeypatch.setattr(CompileProcess, "close", lambda _: events.append("close"))
    monkeypatch.setattr(engine, "kernels_left", lambda _, card: noted if card == "cpu" else pytest.fail(card))
    monkeypatch.setattr(engine, "note_kernels", lambda _, card, left: events.append(f"note of {card}"))
    monkeypatch.setattr(PlainForward, "capturable", True)
    runner, _ = start(cache=CacheOptions(num_kv_blocks=40))
    compiled = [] if is_on_disk else ["start", "slowest_to_compile", "first_buckets"]
    listed = ["compiled_buckets", "note of cpu"] if not is_on_disk or noted is None else []
    assert events == [*compiled, *listed, "close"]
    assert runner._behind.ready()


CARD = {"name": "H200", "major": 9, "minor": 0, "multi_processor_count": 132, "shared_memory_per_block_optin": 232_448}


@pytest.mark.parametrize("changed", CARD)
def test_cards_are_one_if_all_that_plans_depend_on_is(changed, monkeypatch):
    def named(card: dict) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**card))
        monkeypatch.setattr(engine, "shared_memory_bytes", shared_memory_bytes.__wrapped__)
        return engine.card_of(torch.device("cuda"))

    assert named(CARD) == named(dict(CARD)) != named(CARD | {changed: 7})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"head_dim": 16}, "head_dim 16"),
        ({"head_dim": 64, "attention_bias": True}, "biases"),
        ({"head_dim": 64, "rope_parameters": DYNAMIC_ROPE}, "rope type dynamic"),
        ({"head_dim": 64}, None),
    ],
)
def test_models_that_the_fused_pass_does_not_cover_fall_back(values, reason, tiny_model):
    _, folder = tiny_model("Llama", **values)
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
    found = unsupported_reason(model)
    assert (found is None) == (reason is None) and (reason is None or reason in found), found
    kind = FusedForward if reason is None else PlainForward
    with torch.inference_mode():
        assert isinstance(engine._forward(model, StepLimits(2, 16), 32), kind)
