"""Traces of Python code: valid for Perfetto, with the calls where they belong."""

import json
import sys
from array import array

import pytest

from common import tracing
from common.tracing import CallTracer, slices_of, traced


def outer() -> int:
    return inner(3) + inner(4)


def inner(count: int) -> int:
    return len(array("i", range(count)))


def test_calls_become_nested_slices(tmp_path):
    path = tmp_path / "new" / "trace.json"
    tracer = CallTracer()
    tracer.start()
    outer()
    tracer.stop(path)
    assert sys.getprofile() is None
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X"}
    parent = next(event for event in events if event["name"].startswith("outer (") and ".py:" in event["name"])
    children = [event for event in events if event["name"].startswith("inner (")]
    assert len(children) == 2
    assert len([event for event in events if event["name"] == "len"]) == 2
    for child in children:
        assert parent["ts"] <= child["ts"] and child["ts"] + child["dur"] <= parent["ts"] + parent["dur"]


def test_calls_that_were_open_at_either_end():
    events = [(0, False, "before"), (1000, True, "a"), (2000, True, "b"), (5000, False, "b")]
    assert [(s["name"], s["ts"], s["dur"]) for s in slices_of(events)] == [("b", 2, 3), ("a", 1, 4)]
    assert slices_of([]) == []


def test_without_a_file_nothing_is_traced(monkeypatch):
    monkeypatch.setattr(tracing, "new_tracer", None)
    with traced(None):
        assert sys.getprofile() is None


@pytest.mark.filterwarnings("default")
def test_the_tracer_at_hand_writes_what_happens_inside(tmp_path):
    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError), traced(path):
        outer()
        1 // 0  # noqa: B018
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert any("inner" in name for name in names)
