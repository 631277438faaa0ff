"""The soak's own arithmetic, and (slow) a short run of it on real processes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.process_watch import Holding, course, engine_processes, holding, memory_growth_mb
from benchmarks.soak import leaks
from benchmarks.soak_traffic import BAD_BODIES, KINDS, every_kind, http_bad_input

ROOT = Path(__file__).parents[2]


def held(rss_mb: float, threads: int = 4, **fds: int) -> Holding:
    return Holding(rss_mb, Counter(fds or {"socket": 3}), threads)


def test_growth_is_the_last_third_against_the_middle_one():
    samples = [held(10 + step) for step in range(30)]
    assert memory_growth_mb(samples) == 10
    assert memory_growth_mb([held(100 - step) for step in range(10)] + [held(90)] * 20) == 0
    assert memory_growth_mb(samples[:2]) == 0


def test_the_course_has_a_point_for_each_part_that_has_samples():
    assert course([held(step) for step in range(30)], 3) == [4.5, 14.5, 24.5]
    assert course([held(1.0)], 15) == [1.0]


def test_what_this_process_holds():
    before = holding(os.getpid())
    read_fd, write_fd = os.pipe()
    after = holding(os.getpid())
    os.close(read_fd)
    os.close(write_fd)
    assert after.fds["pipe"] == before.fds["pipe"] + 2
    assert after.rss_mb > 1 and after.threads >= 1
    assert engine_processes(os.getpid())["supervisor"] == os.getpid()


def state(processes: dict[str, Holding], **left: int) -> dict:
    return {"left": {"live": 0, "held_blocks": 0, "queued": 0, "tasks": 3} | left, "processes": processes}


def test_nothing_more_than_before_is_no_leak():
    before = state({"frontend": held(50, socket=5, pipe=2)})
    assert leaks(before, state({"frontend": held(90, threads=6, socket=4, pipe=2)}, tasks=2)) == []


def test_each_kind_of_leak_is_named():
    before = state({"frontend": held(50, socket=5, pipe=2)})
    after = state(
        {"frontend": held(50, threads=9, socket=6, pipe=2), "text-7": held(1)}, tasks=5, live=1, held_blocks=2
    )
    assert leaks(before, after) == [
        "1 live left",
        "2 held_blocks left",
        "5 tasks, 3 before",
        "frontend holds 8 file descriptors, 7 before: {'socket': 1} more",
        "frontend has 9 threads, 4 before",
        "text-7 has been started",
    ]


def test_the_warm_up_does_everything():
    counts = Counter(every_kind(KINDS))
    assert counts.pop(http_bad_input) % len(BAD_BODIES) == 0
    assert set(counts.values()) == {1} and len(counts) == len(KINDS) - 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run_finds_nothing(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--smoke"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    entry = json.loads(run.stdout.splitlines()[-1])
    assert run.returncode == 0 and entry["metrics"]["ok"], entry["metrics"]["faults"]
    assert len(entry["metrics"]["done"]) == len(KINDS)
