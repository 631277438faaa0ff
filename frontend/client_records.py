"""What the client socket knows of its clients: a record per client, and a sink for each of its requests.

Sinks collect, in the client's record, what the next flush sends to it. Called by the core with events, and by
`client_server`, which owns the socket and sends the records.
"""

import dataclasses
import hashlib
from array import array
from collections.abc import Callable, Coroutine, Iterable
from functools import lru_cache
from typing import Any

from common import client_messages as wire
from common.errors import RequestError
from frontend.events import Delta, Final
from frontend.pieces import Piece
from frontend.prompt_logprobs import TURN, in_turns
from frontend.request import Request

ROWS_LIMIT = 256
"""Most deltas in one message; so the limit on waiting messages also limits memory."""


class ClientSink:
    """Takes the events of one client's request.

    Args:
        client: who asked.
        request_id: the client's name for it.
        sample_count: how many outputs it is to have.
        start: runs a coroutine as a task on the event loop.

    Attributes:
        request: None while the prompt is being encoded.
        aborted: nothing more is to come of it.
        has_output: it goes on from output that its client has.
        is_unwanted: it was aborted before it could be submitted, which is still needed to put that output into its end.
        is_ending: the request has ended, and its final message is being written.
    """

    __slots__ = (
        "_row_starts", "_start", "aborted", "client", "has_output", "is_ending", "is_unwanted", "request", "request_id",
        "sample_count",
    )  # fmt: skip

    def __init__(
        self,
        client: "ClientRecord",
        request_id: str,
        sample_count: int,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._row_starts: list[bytes] = []
        self._start = start
        self.client = client
        self.request_id = request_id
        self.sample_count = sample_count
        self.request: Request | None = None
        self.aborted = False
        self.has_output = False
        self.is_unwanted = False
        self.is_ending = False

    def on_token(self, sample_index: int, piece: Piece) -> None:
        """Put one more token into the client's next message."""
        client = self.client
        if not client.rows:
            client.touch()
        starts = self._row_starts or self._make_row_starts()
        client.rows.append(starts[sample_index] + (piece.row_end or piece.pack_row_end()))

    def _make_row_starts(self) -> list[bytes]:
        """Made with the first token, since a request that is not streamed needs none."""
        self._row_starts = [wire.Deltas.row_start(self.request_id, index) for index in range(self.sample_count)]
        return self._row_starts

    def on_delta(self, delta: Delta) -> None:
        """Put new output into the client's next message."""
        self.client.rows.append(wire.Deltas.row(self.request_id, delta))
        self.client.touch()

    def on_final(self, final: Final) -> None:
        """Put the result after the client's deltas; one with many log probabilities is written by a task."""
        if final.prompt_logprobs is None and sum(len(sample.logprobs or ()) for sample in final.samples) <= TURN:
            self._end(final, final.samples, None)
        else:
            self.is_ending = True
            self._start(self._end_in_turns(final))

    async def _end_in_turns(self, final: Final) -> None:
        try:
            samples = [dataclasses.replace(each, logprobs=await _packable(each.logprobs)) for each in final.samples]
            prompt_logprobs = await _packable(final.prompt_logprobs)
        except BaseException:
            if self.client.live.get(self.request_id) is self:
                del self.client.live[self.request_id]  # `start` answers with the error
            raise
        if self.client.live.get(self.request_id) is self:
            self._end(final, tuple(samples), prompt_logprobs)

    def _end(self, final: Final, samples: tuple[wire.SampleResult, ...], prompt_logprobs: Any) -> None:
        usage = final.usage
        self.client.end(
            self.request_id,
            wire.Final(
                request_id=self.request_id,
                samples=samples,
                prompt_token_ids=final.prompt_token_ids,
                prompt_logprobs=prompt_logprobs,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                arrived_at_s=final.timings.arrived_at_s,
                first_token_s=final.timings.after_arrival(final.timings.first_token_s),
                last_token_s=final.timings.after_arrival(final.timings.last_token_s),
                finished_s=final.timings.after_arrival(final.timings.finished_s),
            ),
        )

    def on_failed(self, error: RequestError) -> None:
        """Put the error after the client's deltas."""
        self.client.end(self.request_id, error_reply(self.request_id, error))

    def on_never_begun(self) -> None:
        """The request was aborted while its prompt was being encoded: send an empty result."""
        samples = tuple(wire.SampleResult(index, "", array("i"), "abort") for index in range(self.sample_count))
        final = wire.Final(request_id=self.request_id, samples=samples, prompt_token_ids=array("i"))
        self.client.end(self.request_id, final)


class EmbedSink(ClientSink):
    """Takes the end of a request for an embedding."""

    __slots__ = ()

    def on_final(self, final: Final) -> None:
        """Put the embedding into the client's next message."""
        if final.embedding is None:
            self.on_failed(_aborted())
            return
        usage = final.usage
        reply = wire.EmbedReply(self.request_id, final.embedding, usage.prompt_tokens, usage.cached_tokens)
        self.client.end(self.request_id, reply)

    def on_never_begun(self) -> None:
        """The same error as for an abort later on."""
        self.on_failed(_aborted())


class ClientRecord:
    """One client: its live requests, and what the next flush sends it.

    Args:
        touched: clients that the next flush sends something to.
        identity: the ROUTER's name for its connection.

    Attributes:
        key: its name in the log and for the scheduler; short, however long the identity that it chose.
        live: its requests that have not ended, by the client's own ids.
        rows: the deltas of its next message, encoded. While there are any, the next flush handles this client.
        task_count: tasks that work on its messages.
        public_key: the key that it was accepted with; empty if none is required.
        gone: it could not be reached; a message that still comes from there gets a new record.
    """

    __slots__ = ("_touched", "ends", "gone", "identity", "key", "live", "public_key", "rows", "task_count")

    def __init__(self, touched: "dict[bytes, ClientRecord]", identity: bytes) -> None:
        self.identity = identity
        self.key = _key_of(identity)
        self.live: dict[str, ClientSink] = {}
        self.rows: list[bytes] = []
        self.ends: list[bytes] = []
        self.public_key = b""
        self.task_count = 0
        self.gone = False
        self._touched = touched

    def touch(self) -> None:
        """Have the next flush handle this client: send what waits, and forget it if it has nothing under way."""
        if not self.gone:  # the identity may be that of a new record by now
            self._touched[self.identity] = self

    def end(self, request_id: str, reply: wire.Final | wire.ErrorReply | wire.EmbedReply) -> None:
        """A request of this client has ended; its last message is sent after its deltas."""
        self.live.pop(request_id, None)
        self.ends.append(reply.to_wire())
        self.touch()

    def messages(self) -> list[bytes]:
        """Take the messages that wait for this client, deltas first."""
        waiting = [
            wire.Deltas.wire_of(self.rows[start : start + ROWS_LIMIT]) for start in range(0, len(self.rows), ROWS_LIMIT)
        ]
        waiting += self.ends
        self.rows, self.ends = [], []
        return waiting


@lru_cache(1024)
def _key_of(identity: bytes) -> str:
    return hashlib.blake2b(identity, digest_size=8).hexdigest()


class _Packable:
    """Stands for an entry whose list has been made already."""

    __slots__ = ("_fields",)

    def __init__(self, entry: wire.TokenLogprob) -> None:
        self._fields = entry.to_list()

    def to_list(self) -> list[Any]:
        return self._fields


async def _packable(entries: Iterable[wire.TokenLogprob | None] | None) -> Any:
    """Turn log probabilities into lists ahead of packing, so that other tasks can run in between."""
    if entries is None:
        return None
    return tuple(await in_turns(entry and _Packable(entry) for entry in entries))


def error_reply(request_id: str, error: RequestError) -> wire.ErrorReply:
    """An error as a message to the client."""
    param = None if error.param is None else error.param[: wire.PARAM_LIMIT]
    return wire.ErrorReply(request_id, error.code, str(error)[:8000], param, error.retry_after_ms, error.status)


def _aborted() -> RequestError:
    return RequestError("the request was aborted", code="aborted", status=499)
