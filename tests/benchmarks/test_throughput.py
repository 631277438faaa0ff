"""What the throughput benchmark makes of a run's times."""

from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from benchmarks import compare, limits, startup, throughput, workloads
from benchmarks.engines import RequestTiming, TriremeEngine
from benchmarks.throughput import percentile, summarise
from common.model_cache import DEFAULT_MODEL_DIR_NAME


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


def test_bounds_are_kept_where_they_are_asked_for(monkeypatch):
    """The card is measured when the engine has gone."""
    engine = SimpleNamespace(options={"load_format": "dummy"}, max_len=0, is_closed=False)
    engine.close = lambda: setattr(engine, "is_closed", True)
    metrics = {"wall_s": 0.5, "output_tokens_per_s": 1.0, "input_tokens_per_s": 1.0, "ttft_ms": 1.0}

    def measured_ceilings():
        assert engine.is_closed
        return limits.Ceilings(4.24e12, 700e12)

    monkeypatch.setitem(throughput.ENGINES, "trireme", lambda model, options: engine)
    monkeypatch.setattr(throughput, "measure", lambda *_: metrics)
    monkeypatch.setattr(limits, "measured_ceilings", measured_ceilings)
    model = str(Path(throughput.__file__).parent / "models" / "qwen3-0.6b")
    arguments = ["--model", model, "--load-format", "dummy", "--output", ""]
    for more, kept in (([], set()), (["--limits"], {"bound_s", "ratio", "read_tb_per_s", "bf16_tflop_per_s"})):
        engine.is_closed = False
        [entry] = throughput.run("trireme", ["b1_128_512"], throughput.parser("").parse_args([*arguments, *more]))
        assert set(entry["limit"]) == kept
        assert (entry["model"], entry["weights"]) == ("qwen3-0.6b", "random")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--workloads", "b1_128_512", "b1_128"], "unknown workload 'b1_128'"),
        (["--workloads", "b0_128_512"], "unknown workload 'b0_128_512'"),
        (["--workloads", "b1_128_0"], "unknown workload 'b1_128_0'"),
        (["--workloads", "b99999999_128_64"], "has 12799999872 prompt tokens; wanted at most 50000000"),
        (["--workloads", "b1_999999999999_1"], "has 999999999999 prompt tokens; wanted at most 50000000"),
        (["--workloads", f"b1_{'9' * 5000}_1"], "unknown workload 'b1_999"),
        (["--option", "model=x"], "the model has an option of its own: --model"),
        (["--repeats", "0"], "wanted a whole number above 0, got '0'"),
        (["--repeats", "few"], "wanted a whole number above 0, got 'few'"),
        (["--load-format", ""], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused_before_an_engine_starts(monkeypatch, capsys, arguments, error):
    """They ended in a traceback once the engine ran, or drew token ids until the memory was full."""
    monkeypatch.setattr(throughput, "ENGINES", {})
    with pytest.raises(SystemExit) as caught:
        throughput.main([*arguments, "--output", ""])
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


def test_the_lengths_of_a_workload_are_known_without_its_prompts(monkeypatch):
    monkeypatch.setattr(workloads, "uniform", pytest.fail)
    assert workloads.longest("b3_20_7") == 27


@pytest.mark.parametrize("main", [throughput.main, startup.main])
def test_results_that_cannot_be_kept_are_refused_before_an_engine_starts(monkeypatch, tmp_path, main):
    """They were lost in a traceback once they had been measured."""
    monkeypatch.setattr(throughput, "ENGINES", {})
    monkeypatch.setattr(startup, "measure", pytest.fail)
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "results.jsonl"):
        with pytest.raises(SystemExit, match=f"--output: cannot write {path}: "):
            main(["--output", str(path)])


@pytest.mark.parametrize(("options", "kind"), [({}, "off"), ({"prefix_cache": "hash"}, "hash")])
def test_an_option_wins_over_what_the_benchmark_would_choose(monkeypatch, tmp_path, options, kind):
    """It was given twice, which ended in a traceback."""
    status = SimpleNamespace(
        limits={"max_model_len": 9, "block_count": 2, "block_size": 4}, figures={"unprepared_count": 0}
    )
    started = []

    def start(model, **options):
        started.append(options)
        return SimpleNamespace(client=SimpleNamespace(status=lambda: status))

    monkeypatch.setattr("frontend.LLM", start)
    monkeypatch.setattr("benchmarks.engines.write_stand_in_tokenizer", lambda folder: None)
    assert TriremeEngine(str(tmp_path), options).max_len == 9
    assert started == [{"prefix_cache": kind}]


LONG = "--workloads {} has requests of {} tokens, prompt and output; {}"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["b1_16_8", "b1_16_99999"], LONG.format("b1_16_99999", 100_015, "the model takes 40960")),
        (["b2_40960_1"], LONG.format("b2_40960_1", 40_961, "the model takes 40960")),
        (["b1_16_49", "--max-model-len", "64"], LONG.format("b1_16_49", 65, "--max-model-len is 64")),
        (["w1_nano256", "--option", "max_model_len=2k"], LONG.format("w1_nano256", 2011, "--max-model-len is 2000")),
        (["b1_1_50000", "--max-model-len", "60000"], LONG.format("b1_1_50000", 50_001, "the model takes 40960")),
        (["b1_1_7", "--max-model-len", "7", "--model", "o/m"], LONG.format("b1_1_7", 8, "--max-model-len is 7")),
    ],
)  # fmt: skip
def test_requests_above_a_limit_are_refused_before_an_engine_starts(monkeypatch, arguments, error):
    """They ended in a traceback once the engine ran: it had cut the outputs."""
    monkeypatch.setattr(throughput, "ENGINES", {})
    model = str(Path(throughput.__file__).parent / "models" / "qwen3-0.6b")
    with pytest.raises(SystemExit) as caught:
        throughput.main(["--model", model, "--output", "", "--workloads", *arguments])
    assert caught.value.code == error


@pytest.mark.parametrize(
    "arguments", [["b1_16_48", "--max-model-len", "64"], ["b1_1_40960", "--option", "max_model_len=x"]]
)
def test_requests_above_what_the_engine_takes_are_refused_in_a_sentence(monkeypatch, arguments):
    """As where the cache holds less than the model may take, or the model is not here yet."""
    closed = []
    engine = SimpleNamespace(options={}, max_len=63, close=lambda: closed.append(True))
    monkeypatch.setitem(throughput.ENGINES, "trireme", lambda *_: engine)
    with pytest.raises(SystemExit, match="prompt and output; the engine takes 63$"):
        throughput.main(["--model", "not/here", "--output", "", "--workloads", *arguments])
    assert closed


def test_an_engine_that_is_not_installed_is_named(monkeypatch):
    def absent(*_):
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")

    monkeypatch.setitem(throughput.ENGINES, "vllm", absent)
    arguments = ["--engine", "vllm", "--model", "some/model", "--smoke"]
    with pytest.raises(SystemExit, match="--engine vllm needs the package vllm, which is not installed"):
        throughput.main(arguments)


@pytest.mark.parametrize(("name", "model"), [("trireme", "default"), ("transformers", DEFAULT_MODEL_DIR_NAME)])
def test_the_default_model_is_a_folder_for_other_engines(monkeypatch, name, model):
    """They looked for it on the hub."""
    models = []
    engine = SimpleNamespace(options={}, max_len=0, close=lambda: None)
    monkeypatch.setitem(throughput.ENGINES, name, lambda model, options: models.append(model) or engine)
    monkeypatch.setattr(throughput, "fetch_model", lambda model: Path("models") / DEFAULT_MODEL_DIR_NAME)
    throughput.run(name, [], throughput.parser("").parse_args([]))
    assert [Path(each).name for each in models] == [model]


@pytest.mark.parametrize(
    ("more", "theirs"),
    [([], ["b1_16_8", "b4_16_8"]), (["--baseline", "b4_16_8"], ["b4_16_8"])],
    ids=["same", "baseline"],
)
def test_the_other_engine_runs_the_same_workloads_or_the_baseline(monkeypatch, capsys, more, theirs):
    ran = {}

    def run(engine, names, args):
        ran[engine] = names
        return [{"workload": name, "metrics": {"output_tokens_per_s": 10.0}} for name in names]

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr("sys.argv", ["compare", "--smoke", *more])
    compare.main()
    assert ran == {"transformers": theirs, "trireme": ["b1_16_8", "b4_16_8"]}
    assert "1.00 x transformers" in capsys.readouterr().out
