"""The benchmark of what Python does on a request's way, a few requests of it."""

import json
import sys

import pytest

from benchmarks import request_path
from common.model_cache import default_model_dir


def test_every_stage_has_its_figures(monkeypatch, capsys):
    if not default_model_dir().is_dir():
        pytest.skip("the default model is not in the cache")
    monkeypatch.setattr(sys, "argv", ["request_path", "--smoke"])
    request_path.main()
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    stages = (*request_path.STAGES, "all")
    assert set(metrics) == {f"{stage}: {kind}_us" for stage in stages for kind in ("warm", "cold", "least")}
    assert min(metrics.values()) > 0
