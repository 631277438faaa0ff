"""What a replay says about outputs that are equal, different, missing or too many."""

import json
from pathlib import Path

from common.config import EngineConfig
from common.recording import Direction, Link, Record, Recording
from common.replaying import Comparison, Outcome, parse, quantiles_us, run

RECORDS = [
    Record(1_000_000, Link.REQUESTS, Direction.IN, b"ask"),
    Record(2_000_000, Link.PLANS, Direction.OUT, b"a1"),
    Record(3_000_000, Link.OUTPUTS, Direction.OUT, b"b1"),
    Record(4_000_000, Link.PLANS, Direction.OUT, b"c1"),
]


def without_digits(link: int, data: bytes) -> object:
    return data.rstrip(b"0123456789")


def compared(*sent: tuple[Link, bytes], breaks_off: bool = False) -> Comparison:
    comparison = Comparison(RECORDS, without_digits, breaks_off=breaks_off)
    for link, data in sent:
        comparison.sent(link, data)
    comparison.finish()
    return comparison


def test_equal_but_for_what_is_not_read_and_in_any_order_of_links():
    comparison = compared((Link.OUTPUTS, b"b1"), (Link.PLANS, b"a2"), (Link.PLANS, b"c1"))
    assert (comparison.equal_count, comparison.different_count, comparison.first) == (3, 0, None)


def test_the_first_difference_is_shown_in_full():
    comparison = compared((Link.OUTPUTS, b"b1"), (Link.PLANS, b"a1"), (Link.PLANS, b"x1"), (Link.PLANS, b"more"))
    assert (comparison.equal_count, comparison.different_count) == (2, 2)
    assert str(comparison.first) == "message 2 on plans\n  recorded: b'c'\n  replayed: b'x'"


def test_what_a_killed_process_had_no_time_to_record_is_no_difference():
    comparison = compared((Link.PLANS, b"a1"), (Link.PLANS, b"x1"), (Link.PLANS, b"more"), breaks_off=True)
    assert (comparison.equal_count, comparison.different_count) == (1, 2), "another one and a missing one are"


def test_what_does_not_come_is_a_difference():
    comparison = compared((Link.OUTPUTS, b"b1"))
    assert (comparison.equal_count, comparison.different_count) == (1, 2)
    assert str(comparison.first) == "message 1 on plans\n  recorded: b'a'\n  replayed: None"


def test_the_report_ends_with_one_line_of_json(capsys):
    recording = Recording(Path("x.rec"), "scheduler", 0, EngineConfig(), RECORDS)
    assert Outcome(compared((Link.OUTPUTS, b"b1")), 1, 0.5, [1000, 3000], "turn", {"plans": 2}).report(recording) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == ["first difference: message 1 on plans", "  recorded: b'a'", "  replayed: None"]
    summary = json.loads(lines[-1])
    assert summary["process"] == "scheduler"
    assert (summary["received"], summary["equal"], summary["different"], summary["plans"]) == (1, 1, 2, 2)
    assert summary["step_us"] == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert summary["recorded_seconds"] == 0.003
    all_equal = compared((Link.OUTPUTS, b"b1"), (Link.PLANS, b"a1"), (Link.PLANS, b"c1"))
    assert Outcome(all_equal, 1, 0.5, [], "turn", {}).report(recording) == 0


def test_quantiles():
    assert quantiles_us([]) == {"p50": 0, "p90": 0, "p99": 0, "max": 0}
    assert quantiles_us(range(0, 100_000, 1000)) == {"p50": 50, "p90": 90, "p99": 99, "max": 99}


def test_no_recording_is_one_line_and_exit_code_2(tmp_path, capsys):
    def never(*_: object) -> Outcome:
        raise AssertionError

    assert run("scheduler", parse("scheduler_proc", "scheduler", [str(tmp_path)]), never) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.startswith("trireme: cannot read")
