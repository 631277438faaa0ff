"""Every kept result is one JSON object a line in the form that makes it comparable and repeatable, newest last."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import records
from tasks import result_order

ROOT = Path(__file__).parents[2]
FILES = sorted(records.RESULTS_DIR.iterdir())
TEXTS = ("benchmark", "engine", "workload", "device", "commit", "command", "date")
NAMES = ("model", "weights")
"""Texts that may be empty, where nothing of a model is measured."""
OBJECTS = ("options", "metrics", "limit", "versions")
PATHS = re.compile(r"""(?:^|[\s"'=:(])(/\w[\w.-]*(?:/[\w.-]+)*)""")
"""Absolute paths; a result names files as they lie in the repository, or below the home folder as ~."""


def refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each line is, and what it holds."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        yield f"{path.name}:{number}", json.loads(line, parse_constant=refuse)


def texts_of(value: Any) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)


def each_file(test):
    return pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)(test)


def test_a_record_has_the_fields_of_a_kept_result():
    made = records.record(benchmark="b", workload="w", metrics={"us": 1.0}, device="none")
    assert list(made) == ["benchmark", "engine", "workload", *NAMES, "device", *OBJECTS, "commit", "command", "date"]


@each_file
def test_lines_are_complete(path: Path):
    assert path.suffix == ".jsonl" and path.read_text().endswith("}\n")
    wanted = {*TEXTS, *NAMES, *OBJECTS}
    for where, entry in entries(path):
        assert set(entry) == wanted, where
        assert all(isinstance(entry[name], str) for name in (*TEXTS, *NAMES)), where
        assert all(isinstance(entry[name], dict) for name in OBJECTS), where
        assert all(entry[name] for name in (*TEXTS, "metrics")), f"{where}: something that says what it is is empty"
        assert entry["weights"] in ("", "random", "real") and bool(entry["model"]) == bool(entry["weights"]), where
        assert {"python", "torch"} <= entry["versions"].keys(), where


@each_file
def test_lines_can_be_repeated(path: Path):
    for where, entry in entries(path):
        assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", entry["commit"]), f"{where}: commit {entry['commit']}"
        module = re.match(r"python -m (benchmarks(?:\.\w+)+)(?: |$)", entry["command"])
        assert module, f"{where}: {entry['command']}"
        assert (ROOT / (module[1].replace(".", "/") + ".py")).exists(), f"{where}: there is no {module[1]}"


@each_file
def test_the_newest_line_is_the_last(path: Path):
    for where, entry in entries(path):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?", entry["date"]), where
    text = path.read_text()
    assert text == result_order.in_order(text), f"{path.name} is out of order: run python -m tasks fix"


@each_file
def test_no_line_names_a_path_of_the_machine(path: Path):
    for where, entry in entries(path):
        found = [match for text in texts_of(entry) for match in PATHS.findall(text)]
        assert found == [], where


def test_an_absolute_path_would_be_found():
    for text in ("--model /models/mine", "--trace=/data/trace.jsonl", "/opt/model", "in '/srv/x'"):
        assert PATHS.search(text), text
    for text in ("benchmarks/results/x.jsonl", "~/.cache/trireme", "tokens/s", "b8 / b16", "1/2", "out tok/s: 4"):
        assert not PATHS.search(text), text


def test_a_line_does_not_say_of_the_next_that_the_tree_differs(monkeypatch):
    """All lines of a run but the first were marked where the first was kept in the tree."""
    monkeypatch.delenv("TRIREME_COMMIT", raising=False)
    answers = iter(["0123abc\n", "0123abc-dirty\n"])
    git = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(stdout=next(answers)))
    monkeypatch.setattr(records, "subprocess", git)
    records.commit.cache_clear()
    lines = [records.record(benchmark="b", workload="w", device="d", metrics={}) for _ in range(2)]
    records.commit.cache_clear()
    assert [line["commit"] for line in lines] == ["0123abc"] * 2


def test_the_commits_are_in_the_history():
    """Nobody who clones the repository can look up a commit that was rebased away, or that only a tag names: a clone
    need not bring the tags."""
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("not a git checkout with its history")
    listed = subprocess.run(
        ["git", "rev-list", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    known = {entry["commit"].removesuffix("-dirty"): where for path in FILES for where, entry in entries(path)}
    abbreviated = {commit[: len(name)] for name in known for commit in listed}
    assert {name: where for name, where in known.items() if name not in abbreviated} == {}


def test_the_scheduler_is_as_fast_as_was_wanted():
    """The newest figures of each machine against their own limits."""
    newest = {entry["device"]: entry for _, entry in entries(records.RESULTS_DIR / "scheduler_step.jsonl")}
    assert len(newest) > 1
    for device, entry in newest.items():
        metrics, limit = entry["metrics"], entry["limit"]
        step_us = {count: metrics[f"step_{count}"]["plan_and_encode_us_p50"] for count in (256, 1024)}
        assert step_us[256] <= limit["plan_and_encode_us_p50_256"], device
        assert step_us[1024] <= 4 * step_us[256], device
        assert metrics["step_256"]["plan_bytes_max"] <= limit["plan_bytes_256"], device
        for kind in ("hash", "radix"):
            assert metrics[f"lookup_100000_{kind}"]["cold_ms"] <= limit["lookup_100k_ms"], device
            assert metrics[f"memory_{kind}"]["start_mb"] < 80, device
            assert metrics[f"memory_{kind}"]["bytes_per_cached_block"] < limit["bytes_per_cached_block"], device


def test_replays_of_every_policy_and_both_caches_are_kept_for_both_machines():
    kept = set()
    for _, entry in entries(records.RESULTS_DIR / "scheduler_sim.jsonl"):
        if entry["workload"] != "fixed" and entry["metrics"]["requests"] == 12_031:
            options = entry["options"]
            kept.add((options["machine"], options["policy"], options["prefix_cache"]))
            assert entry["metrics"]["leaked_blocks"] == 0
    policies, caches = ("fcfs", "priority", "fair"), ("hash", "radix")
    assert kept >= {(m, policy, cache) for m in ("h200", "8xh200") for policy in policies for cache in caches}
