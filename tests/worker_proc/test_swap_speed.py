"""What the measurement of the link moves, and what it makes of the time."""

from worker_proc import swap_speed


class NotedSwap:
    """Notes what it is told, and whether somebody waited for it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def swap_out(self, pairs) -> None:
        self.calls.append(("out", len(pairs)))

    def swap_in(self, pairs) -> None:
        assert all(host == device for host, device in pairs), "a block comes back to another place"
        self.calls.append(("in", len(pairs)))

    def wait(self) -> None:
        self.calls.append(("wait", 0))


def test_the_second_round_counts_both_ways(monkeypatch):
    times = iter([0.0, 9.0, 10.0, 12.0])
    monkeypatch.setattr(swap_speed.time, "perf_counter", lambda: next(times))
    swap = NotedSwap()
    assert swap_speed.measured_link_bytes_per_s(swap, 50, 8, 1000, swap.wait) == 2 * 8 * 1000 / 2
    assert swap.calls == [("out", 8), ("in", 8), ("wait", 0)] * 2


def test_large_blocks_are_few_and_no_host_blocks_are_no_link():
    swap = NotedSwap()
    assert swap_speed.measured_link_bytes_per_s(swap, 50, 50, swap_speed.MEASURED_BYTES // 2) > 0
    assert swap.calls[0] == ("out", 2)
    assert swap_speed.measured_link_bytes_per_s(swap, 50, 0, 1000) == 0
    assert len(swap.calls) == 4
