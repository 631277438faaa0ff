"""What the throughput benchmark makes of a run's times."""

from random import Random

from benchmarks import workloads
from benchmarks.engines import RequestTiming
from benchmarks.throughput import percentile, summarise


def test_figures_of_a_run():
    timings = [RequestTiming(10.0, 10.5, 11.5, 11), RequestTiming(10.0, 11.0, 14.0, 11), RequestTiming(10.0, 12, 12, 1)]
    figures = summarise(timings, 46)
    assert (figures["wall_s"], figures["input_tokens_per_s"], figures["output_tokens_per_s"]) == (4.0, 11.5, 5.75)
    assert (figures["ttft_ms_p50"], figures["ttft_ms_p99"]) == (1000.0, 2000.0)
    assert (figures["tpot_ms_p50"], figures["tpot_ms_p99"]) == (100.0, 300.0)
    assert figures["ms_per_token"] == 200.0
    assert "itl_ms_p50" not in figures, "times between single tokens are not measured"


def test_percentiles_are_the_nearest_rank():
    values = [float(value) for value in range(1, 101)]
    Random(3).shuffle(values)
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 50.0, 99.0, 100.0]


def test_a_workload_has_the_sizes_that_its_name_says():
    prompts, outputs = workloads.load("b3_20_7")
    assert ([len(ids) for ids in prompts], outputs) == ([20] * 3, [7] * 3)
    assert all(0 <= token <= 10_000 for ids in prompts for token in ids)
