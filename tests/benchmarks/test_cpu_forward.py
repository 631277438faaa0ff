"""The benchmark of the CPU forward pass runs at its smoke size and ends with its JSON line."""

import json
import sys

from benchmarks import cpu_forward
from tests.support import tiny


def test_smoke_run(tmp_path, monkeypatch, capsys):
    folder = tiny.save_model(tmp_path / "model", "Qwen3")
    monkeypatch.setattr(sys, "argv", ["cpu_forward", "--smoke", "--model", str(folder), "--dtype", "float32"])
    cpu_forward.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == "cpu_forward"
    assert [(shape["batch"], shape["queries"]) for shape in result["results"]] == [(2, 1), (1, 8)]
    assert set(result["results"][0]["ms"]) == {"step", "linears", "attention", "norms", "rotation", "lm_head", "other"}
