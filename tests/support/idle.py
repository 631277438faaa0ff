"""Waits until an engine is idle, and has not lost a block by then (check 1 of the faults), or has done something."""

import time
from typing import Any

from frontend import Client

TIMEOUT_S = 60
"""A machine may be busy with other things; nobody waits that long where it is not."""


def is_idle(status: Any) -> bool:
    """Whether nothing lives, runs or waits, and every block is free or cached."""
    figures = status.figures
    busy = status.live_count or figures["running_count"] or figures["waiting_count"] or figures["swapped_count"]
    return not busy and figures["free_block_count"] + figures["cached_block_count"] == figures["total_block_count"]


def assert_becomes_idle(client: Client, what: str = "") -> dict[str, float]:
    """Wait until the engine is idle and its last step is reported; its figures then."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_idle(status := client.status()):
        assert time.monotonic() < deadline_s, f"{what} still busy, or blocks are lost, after {TIMEOUT_S} s: {status}"
    return status.figures


def assert_figure_exceeds(client: Client, name: str, value: float) -> None:
    """Wait until a figure is larger: the scheduler reports a moment after what it reports of."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while (figures := client.status().figures)[name] <= value:
        assert time.monotonic() < deadline_s, f"{name} is not above {value} after {TIMEOUT_S} s: {figures}"
