"""Hands the tokens of the scheduler's messages to their requests: their text, their times, and what ends with them.

A part of the core, which makes the one instance and calls `take`. Knows nothing of sockets, and reads no clock.
"""

from collections.abc import Callable, Iterable, Sequence

from common.errors import RequestError
from common.messages import TokensOut
from frontend.figures import Figures
from frontend.outbox import Outbox
from frontend.request import Request, Sample
from frontend.token_rows import Row, is_sound, note_beginning, rows_of, set_apart, silent_index, stop_token


class TokenIntake:
    """Takes the tokens of all live requests.

    Args:
        outbox: takes aborts of samples that a stop string has ended.
        figures: counts times.
        stream_interval: tokens per delta; a sample's first and last token are not held back.
        now_s: monotonic seconds.
        on_end: called with a request whose samples have all ended.
        on_failed: called with a request that cannot go on, and why.
        on_error: called with a request, and an exception of ours that concerns no other.

    Attributes:
        token_count: output tokens since start.
    """

    def __init__(
        self,
        outbox: Outbox,
        figures: Figures,
        *,
        stream_interval: int,
        now_s: float,
        on_end: Callable[[Request], None],
        on_failed: Callable[[Request, RequestError], None],
        on_error: Callable[[Request, BaseException], None],
    ) -> None:
        self.token_count = 0
        self._firsts: dict[int, Sample] = {}
        self._outbox = outbox
        self._figures = figures
        self._stream_interval = stream_interval
        self._last_step_s = now_s
        self._on_end = on_end
        self._on_failed = on_failed
        self._on_error = on_error

    def admit(self, request: Request) -> None:
        """Take tokens of this request from now on."""
        self._firsts[request.request_id] = request.first

    def dismiss(self, request_id: int) -> None:
        """It has ended: what still comes of it is ignored."""
        self._firsts.pop(request_id, None)

    def take(self, out: TokensOut, now_s: float) -> None:
        """Take the tokens of a message that has come at this time."""
        if out.token_counts:
            self._take_rows(rows_of(out), now_s)
        else:
            request_ids, special = set_apart(out)
            self._take_single_tokens(request_ids, out.token_ids, now_s)
            self._take_rows(rows_of(out, special), now_s)
        self._last_step_s = now_s
        if self._figures.previous_s:
            self._figures.note_gaps(now_s)

    def _take_single_tokens(self, request_ids: Sequence[int], token_ids: Sequence[int], now_s: float) -> None:
        """The usual rows: one token of a request's first sample, and nothing else.

        All that is done for nearly every token stands in this loop: it has a piece, and its sample got a token in the
        step before. The others go by `_extend_by_one`, which does the same and more. Each object that is not touched
        here saves some 0.2 us: since the last token it has left the processor's caches.
        """
        firsts, last_step_s, gathers, steady_count = self._firsts, self._last_step_s, self._stream_interval > 1, 0
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            sample = firsts.get(request_id)
            if sample is None:
                continue
            try:
                piece = None if sample.pieces is None else sample.pieces[token_id]
                if piece is None or sample.last_token_s is not last_step_s or gathers:
                    self._extend_by_one(sample.request, sample, token_id, now_s)
                    continue
                steady_count += 1
                sample.last_token_s = now_s
                sample.token_ids.append(token_id)
                shortcut = sample.shortcut
                if (shortcut is None or not shortcut.take(piece.text)) and (request := sample.request).stream:
                    request.sink.on_token(0, piece)
            except BaseException as error:
                self._on_error(sample.request, error)
        if steady_count:
            self.token_count += steady_count
            self._figures.gap_s.add(now_s - last_step_s, steady_count)

    def _extend_by_one(self, request: Request, sample: Sample, token_id: int, now_s: float) -> None:
        if sample.finish_reason is not None:
            return
        text = sample.add(token_id)
        self.token_count += 1
        self._mark_token(request, sample, now_s)
        if request.stream:
            if sample.finish_reason is not None or self._stream_interval > 1:
                request.emit(sample, text, (token_id,), self._stream_interval)
            else:
                request.sink.on_token(sample.index, sample.piece_of(token_id, text))
        if sample.finish_reason is not None:
            self._sample_ended(request, sample, early=True)

    def _mark_token(self, request: Request, sample: Sample, now_s: float) -> None:
        """Note the time of a sample's new tokens."""
        self._figures.previous_s.append(sample.last_token_s)
        sample.last_token_s = now_s
        if request.timings.first_token_s is None:
            request.timings.first_token_s = now_s
            self._figures.note_first_token(request)

    def _take_rows(self, rows: Iterable[Row], now_s: float) -> None:
        for row in rows:
            first = self._firsts.get(row.request_id)
            if first is None or row.sample_index >= len(first.request.samples):
                continue
            request = first.request
            try:
                self._take_row(request, row, now_s)
            except BaseException as error:
                self._on_error(request, error)

    def _take_row(self, request: Request, row: Row, now_s: float) -> None:
        note_beginning(request, row)
        sample = request.samples[row.sample_index]
        if row.finish is not None and row.finish.reason == "error":
            detail = row.finish.detail or "the engine could not compute this sample"
            self._outbox.abort(request.request_id)
            self._on_failed(request, RequestError(detail, code="sample_failed", status=500))
        elif request.pooling:
            self._take_embedding(request, sample, row, now_s)
        elif sample.finish_reason is None:
            self._extend(request, sample, row, now_s)

    def _take_embedding(self, request: Request, sample: Sample, row: Row, now_s: float) -> None:
        """End a request for an embedding. The row's token means nothing."""
        if not is_sound(row.embedding):
            text = "the model's hidden states for this prompt were not numbers"
            return self._on_failed(request, RequestError(text, code="sample_failed", status=500))
        self._mark_token(request, sample, now_s)
        request.embedding = row.embedding
        sample.finish_reason = "stop"
        self._sample_ended(request, sample, early=False)

    def _extend(self, request: Request, sample: Sample, row: Row, now_s: float) -> None:
        old_count, old_logprob_count = len(sample.token_ids), len(sample.logprobs)
        silent = silent_index(request, row)
        text = ""
        for index, token_id in enumerate(row.token_ids):
            text += sample.add(token_id, row.logprobs.get(index), silent=index == silent)
            if sample.finish_reason is not None:
                break
        new_count = len(sample.token_ids) - old_count
        self.token_count += new_count
        if new_count:
            self._mark_token(request, sample, now_s)
        early = sample.finish_reason is not None and row.finish is None
        if sample.finish_reason is None and row.finish is not None:
            text += sample.end(row.finish.reason, stop_token(request, row))
        if request.stream:
            new_logprobs = sample.logprobs[old_logprob_count:]
            request.emit(sample, text, row.token_ids[:new_count], self._stream_interval, new_logprobs)
        if sample.finish_reason is not None:
            self._sample_ended(request, sample, early=early)

    def _sample_ended(self, request: Request, sample: Sample, *, early: bool) -> None:
        """A sample is complete; `early` if a stop string ended it, which the scheduler does not know of."""
        request.open_count -= 1
        if early:
            self._outbox.abort(request.request_id, sample.index if request.open_count else None)
        if not request.open_count:
            self._on_end(request)
