"""The running requests of a `client.Client`: a stream of deltas, or an embedding that is waited for.

Made by the client, for its caller; each asks the client for its own replies. Without sockets.
"""

import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from common import client_messages as wire
from frontend.client_state import Inbox, deadline_after

if TYPE_CHECKING:
    from frontend.client import Client

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Running(Protocol[ResultT_co]):
    """A running request: what `Stream` and `RunningEmbedding` have in common."""

    def result(self) -> ResultT_co:
        """Wait for the end."""

    def close(self) -> None:
        """Abort the request if it is still running."""


class RunningEmbedding:
    """One running request for an embedding.

    Attributes:
        request_id: the request's name.
    """

    def __init__(self, client: "Client", inbox: Inbox, timeout_s: float | None) -> None:
        self.request_id = inbox.request_id
        self._client = client
        self._inbox = inbox
        self._deadline_s = deadline_after(timeout_s, time.monotonic())

    def result(self) -> wire.EmbedReply:
        """Wait for it."""
        reply = self._client.next_reply(self._inbox, self._deadline_s)
        assert isinstance(reply, wire.EmbedReply), f"wanted EmbedReply, got {type(reply).__name__}"
        return reply

    def close(self) -> None:
        """Abort the request if it is still running."""
        if self._client.is_live(self.request_id):
            self._client.abort(self.request_id)

    def __enter__(self) -> "RunningEmbedding":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream:
    """One running request: iterate over its deltas, or take its `result`.

    Leaving it early (`close`, or the end of a `with` block) aborts the request.

    Attributes:
        request_id: the request's name.
        final: the whole result, once the iteration has ended.
    """

    def __init__(self, client: "Client", inbox: Inbox, timeout_s: float | None) -> None:
        self.request_id = inbox.request_id
        self.final: wire.Final | None = None
        self._client = client
        self._inbox = inbox
        self._deadline_s = deadline_after(timeout_s, time.monotonic())

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> wire.Delta:
        if self.final is None:
            reply = self._client.next_reply(self._inbox, self._deadline_s)
            if isinstance(reply, wire.Delta):
                return reply
            assert isinstance(reply, wire.Final), f"wanted Delta or Final, got {type(reply).__name__}"
            self.final = reply
        raise StopIteration

    def result(self) -> wire.Final:
        """Wait for the whole result, including what was not iterated over."""
        for _ in self:
            pass
        assert self.final is not None
        return self.final

    def whole(self) -> wire.Final:
        """The whole result, for callers that want nothing else; the request is aborted if waiting for it fails."""
        with self:
            return self.result()

    def abort(self) -> None:
        """End the request; its end follows in the iteration."""
        if self._client.is_live(self.request_id):
            self._client.abort(self.request_id)

    def close(self) -> None:
        """Abort the request if it is still running."""
        self.abort()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
