"""The benchmark of the GPU worker's host part, a few steps of it."""

import json
import sys

from benchmarks import worker_host


def test_every_part_of_every_case_has_a_figure(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["worker_host", "--smoke", "--rows", "1", "20", "--new", "2x40"])
    worker_host.main()
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    cases = ("decode 1", "decode 20", "new 2x40", "cold new 2x40")
    assert set(metrics) == {
        f"{case} {part}_us" for case in cases for part in ("decode", "input", "execute", "report", "least")
    }
    assert all(metrics[f"{case} least_us"] > 0 for case in cases)
