"""The benchmark of cache quality runs at its smoke size, and its figures say what they should."""

from benchmarks import quality
from tests.support import tiny


def test_smoke_run(tmp_path, capsys):
    folder = tiny.save_model(tmp_path / "model", "Qwen3")
    results = quality.main(["--smoke", "--model", str(folder), "--device", "cpu", "--dtype", "float32"])
    found = {(entry["workload"], entry["options"]["variant"]): entry["metrics"] for entry in results}
    names = ("float32", "auto", "int8", "fp8")
    references = {("attention", "float32"), ("greedy", "float32")}  # which the others are held against
    assert set(found) == {(kind, name) for kind in quality.MEASUREMENTS for name in names} - references
    assert found["perplexity", "auto"]["percent_over_float32"] == 0.0, "the same computation twice"
    assert 0 < abs(found["perplexity", "int8"]["percent_over_auto"]) < 2
    assert found["greedy", "auto"]["same_answers_of_float32"] == 1.0
    assert found["attention", "auto"]["max_abs_error"] == 0.0
    assert 0.999 < found["attention", "fp8"]["worst_cosine"] < found["attention", "int8"]["worst_cosine"] < 1
    assert len(found["attention", "int8"]["cosines"]) == tiny.SIZES["num_hidden_layers"]
    assert found["needle", "fp8"]["context"] == 400


def test_agreement_counts_answers_tokens_and_prefixes():
    found, wanted = [[1, 2, 3], [1, 9, 3]], [[1, 2, 3], [1, 2, 3]]
    assert quality.agreement(found, wanted) == {"same_answers": 0.5, "same_tokens": 0.8333, "mean_same_prefix": 2.0}
