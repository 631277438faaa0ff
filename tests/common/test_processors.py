"""How many processors a process may use."""

import os

import pytest

from common import processors
from common.processors import granted_cores, granted_threads


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
        ({"of": "0::/system.slice/a.service\n", "system.slice/a.service/cpu.max": "300000 100000"}, 3),
        ({"of": "0::/pod/a\n", "pod/a/cpu.max": "max 100000", "pod/cpu.max": "700000 100000"}, 7),
        (
            {
                "of": "2:memory:/x\n1:cpu,cpuacct:/docker/a\n",
                "cpu/docker/a/cpu.cfs_quota_us": "150000",
                "cpu/docker/a/cpu.cfs_period_us": "100000",
                "cpu/x/cpu.cfs_quota_us": "100000",
                "cpu/x/cpu.cfs_period_us": "100000",
            },
            1.5,
        ),
        ({"of": "0::/not/mounted/here\n", "cpu.max": "200000 100000"}, 2),
        ({"of": "nonsense\n", "cpu.max": "200000 100000"}, 2),
    ],
    ids=repr,
)
def test_a_control_group_limits_the_processors(tmp_path, monkeypatch, files, wanted):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    assert granted_cores(tmp_path, tmp_path / "of") == wanted


@pytest.mark.parametrize(("cores", "threads"), [(16, 16), (2.5, 2), (0.5, 1)])
def test_there_are_no_more_threads_than_the_control_group_grants(monkeypatch, cores, threads):
    monkeypatch.setattr(processors, "granted_cores", lambda: cores)
    assert granted_threads() == threads
