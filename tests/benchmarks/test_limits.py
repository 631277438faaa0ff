"""The bounds of the workloads: costs of a known model, and sums that can be done by hand."""

import json
from pathlib import Path

import pytest

from benchmarks.limits import (
    Ceilings,
    ModelCost,
    bound_s,
    decode_bound_s,
    limit_of,
    newest_results,
    prefill_bound_s,
)
from worker_proc.model_config import read_model_config

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
CEILINGS = Ceilings(read_bytes_per_s=4.24e12, matmul_flop_per_s=700e12)


@pytest.mark.parametrize(("name", "billions"), [("qwen3-0.6b", 0.596), ("llama-3.1-8b", 7.50)])
def test_weights_are_those_of_the_published_models(name, billions):
    """0.44 billion parameters in the layers and 0.156 in the tied table; 8.03 billion less one of two tables."""
    cost = ModelCost.of(read_model_config(MODELS / name))
    assert (cost.layer_weights + cost.head_weights) / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_decode_step_reads_weights_and_cache_once():
    cost = ModelCost.of(read_model_config(MODELS / "qwen3-0.6b"))
    one = decode_bound_s(cost, ([[0] * 128], [2]), CEILINGS)
    wanted = (2 * (cost.layer_weights + cost.head_weights) + 129 * cost.kv_bytes) / 4.24e12
    assert one == pytest.approx(wanted)


def test_a_long_prompt_is_bound_by_operations_and_a_short_one_by_bytes():
    cost = ModelCost(layer_weights=1000, head_weights=0, kv_bytes=1, attention_flop=0)
    ceilings = Ceilings(read_bytes_per_s=1000, matmul_flop_per_s=10_000)
    assert prefill_bound_s(cost, [1], ceilings) == pytest.approx(2.0)
    assert prefill_bound_s(cost, [100], ceilings) == pytest.approx(20.0)
    assert bound_s(cost, ([[0]], [1]), ceilings) == pytest.approx(2.0)


def entry(workload: str, wall_s: float, **options: str) -> dict:
    return {
        "model": "qwen3-0.6b", "engine": "trireme", "device": "NVIDIA H200", "workload": workload,
        "options": options, "metrics": {"wall_s": wall_s},
    }  # fmt: skip


def test_a_results_limit_is_the_workloads_bound_for_its_cache():
    plain = limit_of(entry("b256_128_256", 1.0), MODELS / "qwen3-0.6b", CEILINGS)
    assert plain["ratio"] == pytest.approx(plain["bound_s"], abs=1e-3)
    assert (plain["read_tb_per_s"], plain["bf16_tflop_per_s"]) == (4.24, 700.0)
    eight_bits = limit_of(entry("b256_128_256", 1.0, kv_cache_dtype="int8"), MODELS / "qwen3-0.6b", CEILINGS)
    config = read_model_config(MODELS / "qwen3-0.6b")
    assert ModelCost.of(config).in_8_bits(config).kv_bytes / ModelCost.of(config).kv_bytes == 130 / 256
    assert eight_bits["bound_s"] < plain["bound_s"]


def test_the_newest_result_is_of_a_plain_cache(tmp_path):
    """A bound for keys and values in bfloat16 says nothing about a run with fewer bytes."""
    entries = [entry("w", 3.0), entry("w", 2.0), entry("w", 1.0, kv_cache_dtype="fp8")]
    entries.append({**entry("w", 9.0), "device": "some processor, 2 cores"})
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    assert newest_results("qwen3-0.6b", tmp_path / "results.jsonl") == {"w": {"wall_s": 2.0}}
