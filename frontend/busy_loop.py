"""Busy polling on an asyncio loop: a callback that schedules itself again, so that the loop does not sleep.

Everything else on the loop gets its turn as usual. Made by the frontend's main, which notes the messages.
"""

import asyncio

from common.busy_poll import BusyPoll


class BusyLoop:
    """Keeps the running loop awake for a while after each message.

    Args:
        busy: says for how long.
    """

    def __init__(self, busy: BusyPoll) -> None:
        self._busy = busy
        self._loop = asyncio.get_running_loop()
        self._turns = self._was_noted = False

    def note(self) -> None:
        """A message has come or gone."""
        self._was_noted = self._busy.note()
        if self._was_noted and not self._turns:
            self._turns = True
            self._loop.call_soon(self._turn)

    def close(self) -> None:
        """Sleep from now on."""
        self._busy.limit_s = 0.0
        self._busy.close()

    def _turn(self) -> None:
        """Once in each turn of the loop; one without a message was in vain."""
        if self._was_noted:
            self._was_noted = False
        else:
            self._turns = self._busy.turn()
        if self._turns:
            self._loop.call_soon(self._turn)
