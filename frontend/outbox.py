"""The messages to the scheduler, sent or held back: requests, aborts, the order to forget cached prefixes.

While scheduler and worker are being started again (`suspended`), requests are held and everything else is dropped: a
new scheduler has nothing that could be aborted or forgotten. Called by `core.Core` alone.
"""

from array import array
from collections.abc import Callable, Iterable

from common.messages import AbortRequests, AbortSamples, FlushCache, MoreFollows
from frontend.request import Request

GROUP_SIZE = 4
"""Requests that are sent ahead of those behind them, which are still being read: the scheduler works on them
meanwhile."""
MORE_FOLLOWS, NONE_FOLLOWS = MoreFollows().to_wire(), MoreFollows(follows=False).to_wire()


class Outbox:
    """Sends messages to the scheduler, or holds them back.

    Args:
        send: takes a message's bytes, and True if it is to arrive with the next one at once; must not block.
        clock: monotonic seconds.

    Attributes:
        suspended: there is no scheduler; nothing is sent.
    """

    def __init__(self, send: Callable[..., object], clock: Callable[[], float]) -> None:
        self.suspended = False
        self._promised_until_s: dict[object, float] = {}  # by who has said that more follows
        self._gathers = self._has_promised = False
        self._send = send
        self._clock = clock
        self._held: set[int] = set()
        self._gathered: list[bytes] = []
        self._abort_ids = array("i")
        self._abort_samples: list[tuple[int, int]] = []

    @property
    def held_count(self) -> int:
        """How many requests are held back."""
        return len(self._held)

    def promise(self, sender: object, follows: bool) -> None:
        """Whether a sender of requests has said with the last ones that more follow; it is believed for a while.

        Args:
            sender: what tells it from others; forgotten with its word, once that is old.
        """
        if follows:
            self._forget_old_promises()
            self._promised_until_s[sender] = self._clock() + MoreFollows.BELIEVED_S
        else:
            self._promised_until_s.pop(sender, None)

    def _more_follows(self) -> bool:
        """Whether anybody's word of more holds."""
        self._forget_old_promises()
        return bool(self._promised_until_s)

    def _forget_old_promises(self) -> None:
        if self._promised_until_s:
            now_s = self._clock()
            self._promised_until_s = {who: end_s for who, end_s in self._promised_until_s.items() if now_s < end_s}

    def request(self, request: Request) -> None:
        """Send a request, with the output that it already has; or hold it back while suspended."""
        if self.suspended:
            self._held.add(request.request_id)
            return
        data = request.continued_message().to_wire()
        if self._gathers:
            self._gathered.append(data)
        else:
            self._send_together([data], more_follows=self._more_follows())
        request.was_sent, request.sent_count = True, request.output_count
        if request.timings.submitted_s is None:
            request.timings.submitted_s = self._clock()

    def resume(self, requests: Iterable[Request]) -> None:
        """There is a new scheduler, which knows none of these requests: send them all."""
        self.suspended = False
        self._held.clear()
        for request in requests:
            self.request(request)

    def forget(self, request_id: int) -> None:
        """The request has ended; it is not held any more."""
        self._held.discard(request_id)

    def abort(self, request_id: int, sample_index: int | None = None) -> None:
        """Abort a request, or one of its samples, with the next `flush`."""
        if sample_index is None:
            self._abort_ids.append(request_id)
        else:
            self._abort_samples.append((request_id, sample_index))

    def gather(self) -> None:
        """Something has come that may be a request: those from now on wait for the next `flush`. GROUP_SIZE requests go
        ahead of it, and the scheduler hears that they are not all."""
        self._gathers = True
        if len(self._gathered) >= GROUP_SIZE:
            self._send_gathered(more_follows=True)

    def _send_gathered(self, *, more_follows: bool) -> None:
        self._send_together(self._gathered, more_follows=more_follows)
        self._gathered = []

    def _send_together(self, messages: list[bytes], *, more_follows: bool) -> None:
        *others, last = messages + [MORE_FOLLOWS] * more_follows
        for data in others:
            self._send(data, True)
        self._send(last)
        self._has_promised = more_follows

    def flush(self) -> None:
        """Send the gathered requests, then the collected aborts, which may be theirs."""
        if self._gathered:
            self._send_gathered(more_follows=self._more_follows())
        elif self._has_promised and not self._more_follows():
            if not self.suspended:
                self._send(NONE_FOLLOWS)
            self._has_promised = False
        self._gathers = False
        ids, samples = self._abort_ids, self._abort_samples
        if not (ids or samples):
            return
        self._abort_ids, self._abort_samples = array("i"), []
        if ids and not self.suspended:
            self._send(AbortRequests(ids).to_wire())
        if samples and not self.suspended:
            numbers, indices = zip(*samples, strict=True)
            self._send(AbortSamples(array("i", numbers), array("B", indices)).to_wire())

    def flush_cache(self) -> None:
        """Have the scheduler forget every cached prefix that no live request holds."""
        if not self.suspended:
            self._send(FlushCache().to_wire())
