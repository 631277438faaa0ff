"""How many processors a process may use."""

import os

import pytest

from common.processors import granted_cores


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu.max": "250000 100000\n"}, 2.5),
        ({"cpu.max": "6400000 100000\n"}, 16),
        ({"cpu.max": "nonsense"}, 16),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
    ],
    ids=repr,
)
def test_a_control_group_limits_the_processors(tmp_path, monkeypatch, files, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert granted_cores(tmp_path) == wanted
