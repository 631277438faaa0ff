"""The last minutes of an engine, second by second, for the dashboard's charts.

One row per second is kept for five minutes, computed from differences of the figures that the core counts anyway. So a
page that has just been opened shows the past too. Called by the HTTP server and by the dashboard's endpoint.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from common.messages import STEP_PARTS, EngineStats
from common.version import own_version
from frontend.engine import Engine
from frontend.figures import FAILURES, Histogram, percentile

INTERVAL_S = 1.0
KEPT_ROWS = 300
WINDOW_ROWS = 10
"""Requests come far less often than tokens: their time to first token and prefix hits are over so many seconds."""
SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
FIELDS = (
    "time_s", "running", "waiting", "swapped", "kv_used", "kv_cached", "output_tps", "prefill_tps", "finished_ps",
    "aborted_ps", "refused_ps", "failed_ps", "preemptions", "hit_rate", "steps_ps", "decode_rows", "chunk_tokens",
    *(f"ttft_{name}" for name in SHARES), *(f"itl_{name}" for name in SHARES), *(f"{part}_us" for part in STEP_PARTS),
)  # fmt: skip
"""A row's figures: requests and blocks as they stand (blocks as shares of all), rates per second, `decode_rows`,
`chunk_tokens` and `*_us` per step, `preemptions` since the row before, `ttft_*` and `itl_*` in milliseconds; None where
nothing happened."""

Row = list[float | None]


class History:
    """Rows of figures, the newest last.

    Args:
        engine: whose.
        clock: monotonic seconds; wall_clock: seconds since the epoch.

    Attributes:
        run: identifies this run of the frontend: a page that has rows of another one starts over.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.run = f"{wall_clock():.3f}"
        self._engine = engine
        self._clock = clock
        self._wall_clock = wall_clock
        self._rows: deque[Row] = deque(maxlen=KEPT_ROWS)
        self._row_count = 0
        self._started_s = clock()
        self._first_tokens: deque[list[int]] = deque(maxlen=WINDOW_ROWS)
        self._prefix: deque[tuple[int, int]] = deque([(0, 0)] * WINDOW_ROWS, maxlen=WINDOW_ROWS)
        self._timer: asyncio.TimerHandle | None = None
        self._remember(clock())

    def start(self) -> None:
        """Add a row every second from now on."""
        loop = asyncio.get_running_loop()
        next_s = loop.time() + INTERVAL_S

        def tick() -> None:
            nonlocal next_s
            self.add_row()
            next_s = max(next_s + INTERVAL_S, loop.time())
            self._timer = loop.call_at(next_s, tick)

        self._timer = loop.call_at(next_s, tick)

    def stop(self) -> None:
        """Add no more."""
        if self._timer is not None:
            self._timer.cancel()

    def add_row(self) -> None:
        """The time since the last row, as a row."""
        now_s = self._clock()
        seconds = max(now_s - self._at_s, 1e-3)
        row = {name: None for name in FIELDS} | {"time_s": round(self._wall_clock(), 1)}
        row |= self._standing(self._engine.stats) | self._rates(seconds) | self._steps(seconds) | self._latencies()
        assert len(row) == len(FIELDS), f"a row has figures that FIELDS lacks: {row.keys() - set(FIELDS)}"
        self._rows.append([value if value is None else round(value, 4) for value in row.values()])
        self._row_count += 1
        self._remember(now_s)

    def view(self, run: str, row_number: int) -> dict[str, Any]:
        """The rows that a page does not have yet.

        Args:
            run: the run that its rows are from.
            row_number: how many rows there were when it last asked.
        """
        new_count = self._row_count - row_number if run == self.run else len(self._rows)
        rows = list(self._rows)[max(len(self._rows) - new_count, 0) :] if new_count > 0 else []
        health, limits = self._engine.health(), self._engine.limits
        names = ("max_model_len", "max_num_seqs", "block_size", "block_count")
        return {
            "run": self.run,
            "row_number": self._row_count,
            "interval_s": INTERVAL_S,
            "kept_rows": KEPT_ROWS,
            "model": self._engine.model_names[0],
            "version": own_version(),
            "state": health.state,
            "detail": health.detail,
            "uptime_s": round(self._clock() - self._started_s, 1),
            "live_count": self._engine.core.live_count,
            "task_count": len(asyncio.all_tasks()),
            "limits": {name: getattr(limits, name) for name in names} if limits else {},
            "totals": {name: getattr(self._engine.stats, name) for name in EngineStats.GAUGES},
            "fields": FIELDS,
            "rows": rows,
        }

    # -- one row -------------------------------------------------------------------------------------------------------

    def _remember(self, now_s: float) -> None:
        """What the next row is a difference to."""
        core = self._engine.core
        self._at_s = now_s
        self._stats = core.stats
        self._token_count = core.token_count
        self._ended = dict(core.figures.ended)
        self._parts_us = list(core.figures.step_totals_us().values())
        self._gap_counts = list(core.figures.gap_s.counts)
        self._first_tokens.append(list(core.figures.first_token_s.counts))

    def _standing(self, stats: EngineStats) -> dict[str, float | None]:
        block_count = max(1, stats.total_block_count)
        used_count = stats.total_block_count - stats.free_block_count - stats.cached_block_count
        return {
            "running": stats.running_count,
            "waiting": stats.waiting_count,
            "swapped": stats.swapped_count,
            "kv_used": used_count / block_count,
            "kv_cached": stats.cached_block_count / block_count,
        }

    def _rates(self, seconds: float) -> dict[str, float | None]:
        core = self._engine.core
        ended = {name: count - self._ended.get(name, 0) for name, count in core.figures.ended.items()}
        finished = ended.pop("stop", 0) + ended.pop("length", 0)
        aborted = ended.pop("abort", 0)
        failed = sum(ended.pop(name, 0) for name in FAILURES)
        self._prefix.append((self._since("prefix_query_tokens"), self._since("prefix_hit_tokens")))
        queries, hits = map(sum, zip(*self._prefix, strict=True))
        return {
            "output_tps": (core.token_count - self._token_count) / seconds,
            "prefill_tps": self._since("chunk_tokens") / seconds,
            "finished_ps": finished / seconds,
            "aborted_ps": aborted / seconds,
            "refused_ps": sum(ended.values()) / seconds,
            "failed_ps": failed / seconds,
            "preemptions": self._since("preemptions"),
            "hit_rate": hits / queries if queries else None,
        }

    def _steps(self, seconds: float) -> dict[str, float | None]:
        """The means of the steps since the last row; only their rate if there were none."""
        step_count = self._since("steps")
        if not step_count:
            return {"steps_ps": 0.0}
        row: dict[str, float | None] = {
            "steps_ps": step_count / seconds,
            "decode_rows": self._since("decode_tokens") / step_count,
            "chunk_tokens": self._since("chunk_tokens") / step_count,
        }
        totals_us = self._engine.core.figures.step_totals_us().values()
        for part, now_us, then_us in zip(STEP_PARTS, totals_us, self._parts_us, strict=True):
            row[f"{part}_us"] = (now_us - then_us) / step_count
        return row

    def _latencies(self) -> dict[str, float | None]:
        figures = self._engine.core.figures
        found: dict[str, float | None] = {}
        for name, histogram, then in (
            ("ttft", figures.first_token_s, self._first_tokens[0]),
            ("itl", figures.gap_s, self._gap_counts),
        ):
            for share_name, value in _percentiles_ms(histogram, then).items():
                found[f"{name}_{share_name}"] = value
        return found

    def _since(self, name: str) -> int:
        """By how much a counter of the scheduler's has grown; it does not start over when a scheduler is restarted."""
        return int(getattr(self._engine.stats, name) - getattr(self._stats, name))


def _percentiles_ms(histogram: Histogram, then: list[int]) -> dict[str, float | None]:
    counts = [now - before for now, before in zip(histogram.counts, then, strict=True)]
    seconds = {name: percentile(histogram.bounds, counts, share) for name, share in SHARES.items()}
    return {name: None if value is None else value * 1000 for name, value in seconds.items()}
