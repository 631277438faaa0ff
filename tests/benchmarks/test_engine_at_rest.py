"""The benchmarks of an engine that nobody wants anything of any more: arithmetic, and (slow) their smoke sizes."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks import disconnects, idle
from benchmarks.process_watch import Activity, activity

ROOT = Path(__file__).parents[2]


def test_usage_is_of_one_core_and_by_the_second():
    assert idle.usage(Activity(1.0, 100), Activity(1.5, 130), 20.0) == {"cpu_percent": 2.5, "wakes_per_s": 1.5}


def test_what_this_process_has_used():
    before = activity(os.getpid())
    for _ in range(20):
        waiting = threading.Event()
        threading.Timer(0.001, waiting.set).start()
        waiting.wait()
    after = activity(os.getpid())
    assert after.wakes > before.wakes
    assert 0 < before.cpu_s <= after.cpu_s


def test_times_are_summed_up_in_milliseconds():
    assert disconnects.summary([(0.001, 0.1), (0.003, 0.2), (0.002, 0.9)]) == {
        "noticed_p50_ms": 2.0, "noticed_max_ms": 3.0, "freed_p50_ms": 200.0, "freed_max_ms": 900.0
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", ["disconnects", "idle"])
def test_a_smoke_run_gives_every_figure(module):
    run = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--smoke"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    metrics = json.loads(run.stdout.splitlines()[-1])["metrics"]
    if module == "disconnects":
        assert {"_".join(case) for case in disconnects.CASES} | {"longest_ms"} == set(metrics)
    else:
        assert {"supervisor", "frontend", "scheduler", "worker-0", "most_percent"} == set(metrics)
