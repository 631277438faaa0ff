"""The smoke size of the frontend's benchmark: every token arrives, and every figure is there."""

import pytest

from benchmarks import frontend as benchmark
from common.model_cache import default_model_dir


def test_the_smoke_size():
    if not default_model_dir().is_dir():
        pytest.skip("the default model is not in the cache")
    metrics = benchmark.measure(streams=8, rate=4000, clients=2, token_count=50)
    assert metrics["token_count"] == 400
    assert {*benchmark.TARGETS, "gap_ms_p50", "gap_ms_p99"} <= {*metrics}
