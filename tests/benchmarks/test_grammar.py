"""The benchmark of structured outputs runs at its smoke size and ends with its JSON line."""

import json
import sys

from benchmarks import grammar


def test_smoke_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["grammar", "--smoke"])
    grammar.main()
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert set(metrics) == {"vocab_size", "vocabulary_ms", "schema", "json_object", "regex"}
    assert metrics["schema"]["mask_us_p50"] > 0
