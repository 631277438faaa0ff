"""The messages to the scheduler, sent or held back: requests, aborts, the order to forget cached prefixes.

While scheduler and worker are being started again (`suspended`), requests are held and everything else is dropped: a
new scheduler has nothing that could be aborted or forgotten. Called by `core.Core` alone.
"""

from array import array
from collections.abc import Callable, Iterable

from common.messages import AbortRequests, AbortSamples, FlushCache
from frontend.request import Request


class Outbox:
    """Sends messages to the scheduler, or holds them back.

    Args:
        send: takes a message's bytes, and True if it is to arrive with the next one at once; must not block.
        clock: monotonic seconds.

    Attributes:
        suspended: there is no scheduler; nothing is sent.
        gathers: requests wait for the next `flush`, so that the scheduler gets at once what came at once.
    """

    def __init__(self, send: Callable[..., object], clock: Callable[[], float]) -> None:
        self.suspended = False
        self.gathers = False
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

    def request(self, request: Request) -> None:
        """Send a request, with the output that it already has; or hold it back while suspended."""
        if self.suspended:
            self._held.add(request.request_id)
            return
        data = request.continued_message().to_wire()
        if self.gathers:
            self._gathered.append(data)
        else:
            self._send(data)
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

    def flush(self) -> None:
        """Send the gathered requests, then the collected aborts, which may be theirs."""
        gathered, self._gathered, self.gathers = self._gathered, [], False
        if gathered:
            *others, last = gathered
            for data in others:
                self._send(data, True)
            self._send(last)
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
