"""The bounds of the workloads: costs of a known model, and sums that can be done by hand."""

from pathlib import Path

import pytest

from benchmarks.limits import Ceilings, ModelCost, bound_s, decode_bound_s, prefill_bound_s
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
