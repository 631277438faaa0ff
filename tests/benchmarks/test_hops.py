"""The benchmark of a request's way through the processes: every part of its timeline is found."""

import sys

import pytest

from benchmarks import hops
from common.model_cache import default_model_dir


def test_the_parts_of_a_request_add_up(tmp_path):
    if not default_model_dir().is_dir():
        pytest.skip("the default model is not in the cache")
    figures, sizes = hops.measure_timeline(tmp_path, count=1, step_ms=0.0)
    parts_us = [times["p50"] for times in figures["parts_us"].values()]
    assert len(parts_us) == 11 and min(parts_us) > 0
    assert sum(parts_us) == pytest.approx(figures["whole_recorded_us"]["p50"], abs=2)
    assert sizes["frontend to scheduler"] > 4 * hops.PROMPT_TOKENS


@pytest.mark.parametrize(
    ("arguments", "durations_ms"),
    [(["--smoke", "--busy-poll-ms", "0", "7"], [0, 7]), (["--smoke"], [-1]), ([], hops.BUSY_POLL_MS)],
)
def test_the_durations_that_are_given_are_measured(monkeypatch, arguments, durations_ms):
    """`--smoke` passed them over."""
    measured = []

    def measure(count: int, step_ms: float, durations_ms: list[float], **options: str) -> list:
        measured.extend(durations_ms)
        return []

    monkeypatch.setattr(hops, "measure", measure)
    monkeypatch.setattr(hops, "print_table", lambda *_: sys.exit(0))
    monkeypatch.setattr(sys, "argv", ["hops", *arguments])
    with pytest.raises(SystemExit):
        hops.main()
    assert measured == list(durations_ms)


def test_a_ping_pong_gives_a_time_for_each_size(tmp_path):
    for kind, way in (("internal", "blocking"), ("client", "spinning"), ("internal", "awake"), ("unix", "blocking")):
        hops_us = hops.ping_pong.hops_us(tmp_path / f"{kind}-{way}", kind, [40, 600], count=3, way=way, rest_s=1e-4)
        assert len(hops_us) == 2 and min(hops_us) > 0
