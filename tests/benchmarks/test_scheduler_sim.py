"""The scheduler's benchmarks at their smallest: fixed runs, a made-up trace, step costs."""

import json
import sys

import pytest

from benchmarks import scheduler_sim, scheduler_step, svg_plot
from benchmarks.step_cost import H200


def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["scheduler_sim", *arguments])
    scheduler_sim.main()
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("run", scheduler_sim.FIXED_RUNS, ids=lambda run: run.name)
def test_fixed_runs(run, run_ahead):
    figures = scheduler_sim.run_fixed(run, run_ahead)
    assert figures["leaked_blocks"] == 0
    assert figures["peak_blocks"] < figures["peak_blocks_up_front"]
    assert run_ahead > 0 or figures["max_service_gap"] <= 2


def test_fixed_runs_of_known_outcome(monkeypatch, capsys):
    runs = {run["name"]: run for run in run_main(monkeypatch, capsys, "--fixed")["runs"]}
    assert (runs["fairness"]["rounds"], runs["fairness"]["preemptions"]) == (12, 0)
    assert runs["pressure"]["rounds"] <= 12 and runs["pressure"]["preemptions"] <= 4


def write_trace(path):
    """Three turns of one conversation, and requests of their own beside it."""
    entries = [
        {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 10, "input_length": 700, "output_length": 3, "hash_ids": [8, 9]},
        {"timestamp": 900, "input_length": 1600, "output_length": 4, "hash_ids": [1, 3, 4, 5]},
        {"timestamp": 1900, "input_length": 1600, "output_length": 1, "hash_ids": [1, 3, 4, 5]},
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return str(path)


@pytest.mark.parametrize("machine", ["h200", "8xh200"])
def test_trace_replay(monkeypatch, capsys, tmp_path, machine):
    trace = write_trace(tmp_path / "trace.jsonl")
    figures = run_main(monkeypatch, capsys, "--trace", trace, "--blocks", "unlimited", "--machine", machine)
    assert figures["requests"] == 4 and figures["output_tokens"] == 13
    assert figures["hit_fraction_512"] == round(5 / 12, 4)
    assert figures["preemptions"] == figures["leaked_blocks"] == 0
    assert 0 < figures["ttft_ms_p50"] <= figures["ttft_ms_p99"]


def test_a_stretched_trace_comes_more_slowly(monkeypatch, capsys, tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl")
    once, thrice = (run_main(monkeypatch, capsys, "--trace", trace, "--stretch", factor) for factor in ("1", "3"))
    assert thrice["simulated_s"] == pytest.approx(3 * once["simulated_s"], rel=0.1)
    assert thrice["output_tokens"] == once["output_tokens"]


def test_trace_replay_in_a_small_cache_with_plots(monkeypatch, capsys, tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl")
    plots = tmp_path / "plots"
    figures = run_main(
        monkeypatch, capsys, "--trace", trace, "--blocks", "110", "--requests", "3", "--plot", str(plots)
    )
    assert figures["requests"] == 3 and figures["evictions"] > 0
    assert "<svg" in (plots / "ttft.svg").read_text()


def test_step_costs_at_smoke_size():
    metrics = scheduler_step.measure(smoke=True)
    assert metrics["step_16"]["plan_bytes_max"] < 200
    assert metrics["memory_hash"]["start_mb"] < 80
    assert metrics["memory_hash"]["bytes_per_cached_block"] < 200


def test_cost_model_adds_up():
    assert H200.seconds(1, 0, 0) == pytest.approx(200e-6 + 1.2e9 / 4.2e12)
    assert H200.seconds(1, 1000, 0) > H200.seconds(1, 0, 0)
    assert H200.seconds(8192, 0, 8192 * 4096) > H200.seconds(8192, 0, 0)


def test_a_plot_names_its_lines():
    assert ">fcfs</text>" in svg_plot.line_plot("title", "x", "y", {"fcfs": [(0.0, 0.0), (2.0, 1.0)]})
