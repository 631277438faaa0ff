"""Counts restarts of lost processes, and says whether another one is allowed (`--restart-limit`).

Called by the `Supervisor`; the clock is passed in.
"""

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 300.0
"""The limit is on restarts within this time, so that a crash loop ends and a loss now and then does not."""


class Restarts:
    """Counts restarts.

    Args:
        limit: how many are allowed within WINDOW_S; 0 for none at all.
        clock: monotonic seconds.

    Attributes:
        count: since the engine's start.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.count = 0
        self._clock = clock
        self._recent_s: deque[float] = deque()

    def take(self) -> bool:
        """Count one more restart; False if it is not allowed."""
        now_s = self._clock()
        while self._recent_s and self._recent_s[0] <= now_s - WINDOW_S:
            self._recent_s.popleft()
        if len(self._recent_s) >= self.limit:
            return False
        self._recent_s.append(now_s)
        self.count += 1
        return True
