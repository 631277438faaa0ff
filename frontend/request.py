"""One request and its samples, from submission to the end: what has come so far, as tokens and as text.

Knows nothing of sockets, clocks or other requests. `core.Core` feeds it tokens and passes its events on.
"""

import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from functools import partial

from common.client_messages import SampleSoFar
from common.errors import RequestError
from common.messages import AddRequest, RequestFailed, TokenLogprobs
from common.sampling_params import SamplingParams
from frontend.events import Delta, Final, SampleResult, Shortcut, Sink, Timings, TokenLogprob, TopLogprob, Usage
from frontend.pieces import WITHOUT_TEXT, Piece, PiecesWithout, PieceTable
from frontend.prompt_logprobs import PromptLogprobs
from frontend.stop_strings import StopMatcher, StopStrings
from frontend.tokenizer import Tokenizer


class Sample:
    """One of a request's n outputs.

    Args:
        request: whose sample this is.
        index: which one.

    Attributes:
        pieces: if set, the next token's text may be taken from there. The core then keeps the token itself, which is
            all that has to be done: its text is put to the others when they are needed.
        known_count: tokens that had come when an earlier frontend was lost.
        shortcut: if set, it is offered the texts of such tokens before the request's sink.
    """

    __slots__ = (
        "_detokenizer", "_known_pieces", "_matcher", "_plain_pieces", "_text_count", "_text_parts", "finish_reason",
        "index", "known_count", "last_token_s", "logprobs", "pending", "pieces", "preemption_count", "request",
        "shortcut", "stop_reason", "token_ids",
    )  # fmt: skip

    def __init__(self, request: "Request", index: int) -> None:
        params = request.params
        self.index = index
        self.token_ids = array("i")
        self._text_parts: list[str] = []
        self._text_count = 0  # so many of the tokens have their text in there
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.pending: Delta | None = None
        self.last_token_s: float | None = None
        self.preemption_count = 0
        self.known_count = 0
        self.shortcut: Shortcut | None = None
        self.request = request
        self._detokenizer = request.tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, at_start=request.starts_text
        )
        self._matcher = StopMatcher(request.stops) if request.stops else None
        self._known_pieces = self._detokenizer.pieces if params.detokenize else WITHOUT_TEXT
        self._plain_pieces = self._pieces_without_stops()
        self.pieces: PieceTable | PiecesWithout | None = None

    def add(self, token_id: int, logprobs: TokenLogprobs | None = None, *, silent: bool = False) -> str:
        """Take one more token.

        Args:
            token_id: the token.
            logprobs: what the worker reported for it.
            silent: the token ends the sample and is not part of the text.

        Returns:
            The text that may be shown now. If a stop string completed, `finish_reason` is set.
        """
        self._add_texts()
        self.token_ids.append(token_id)
        self._text_count += 1
        shown = self.request.params.detokenize and not silent
        text = self._detokenizer.push(token_id) if shown else ""
        if logprobs is not None:
            self.logprobs.append(self.request.describe(token_id, text, logprobs))
        if self._matcher is not None and text:
            text = self._match(text)
        if text:
            self._text_parts.append(text)
        depends = self._detokenizer.holds_back or (self._matcher is not None and self._matcher.holds_back)
        self.pieces = None if depends or self.finish_reason is not None else self._plain_pieces
        return text

    def piece_of(self, token_id: int, text: str) -> Piece:
        """A token with the text that `add` gave for it; nearly always that of other streams."""
        known = None if self._known_pieces is None else self._known_pieces[token_id]
        return known if known is not None and known.text == text else Piece(token_id, text)

    def take_up(self, known: SampleSoFar) -> None:
        """Bring the sample to where it was when an earlier frontend was lost; the text so far is not shown again."""
        request, reason = self.request, known.finish_reason
        ends_silently = reason == "stop" and not request.params.include_stop_str_in_output
        for count, token_id in enumerate(known.token_ids, 1):
            is_last = count == len(known.token_ids)
            self.add(token_id, silent=ends_silently and is_last and token_id in request.end_token_ids)
            self.known_count = count
            if self.finish_reason is not None:
                return
        if reason is not None:
            self.end(reason, known.stop_reason)

    def end(self, reason: str, stop_reason: str | int | None = None) -> str:
        """End the sample; returns the text that was held back."""
        self._add_texts()
        text = ""
        if self.request.params.detokenize and self.finish_reason is None:
            text = self._detokenizer.finish()
            if text and self.logprobs:
                self._lengthen_last_logprob(text)
            if self._matcher is not None:
                text = self._matcher.flush() + text
            if text:
                self._text_parts.append(text)
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason
        self.pieces = None
        return text

    def result(self) -> SampleResult:
        """The whole sample."""
        assert self.finish_reason is not None, f"sample {self.index} has not ended"
        self._add_texts()
        return SampleResult(
            self.index,
            "".join(self._text_parts),
            self.token_ids,
            self.finish_reason,
            self.stop_reason,
            tuple(self.logprobs) if self.request.params.logprobs is not None else None,
        )

    def _add_texts(self) -> None:
        """Add the texts of the tokens that the core has kept by itself."""
        if self._text_count < len(self.token_ids) and self._known_pieces is not None:
            self._text_parts += self._known_pieces.texts(self.token_ids[self._text_count :])
            self._text_count = len(self.token_ids)

    def _pieces_without_stops(self) -> PieceTable | PiecesWithout | None:
        """The tokens that are all that is shown for them, and in whose text no stop string begins."""
        if self._known_pieces is None:
            return None
        stops = self.request.stops
        return self._known_pieces if stops is None else PiecesWithout(self._known_pieces, stops.first_character)

    def _match(self, text: str) -> str:
        assert self._matcher is not None
        params = self.request.params
        shown, stop = self._matcher.feed(text, may_end=len(self.token_ids) > params.min_tokens)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
            if params.include_stop_str_in_output:
                shown += stop
        return shown

    def _lengthen_last_logprob(self, text: str) -> None:
        last = self.logprobs[-1]
        self.logprobs[-1] = TokenLogprob(
            last.token_id, last.text + text, last.raw, last.logprob, last.rank, last.top
        )  # fmt: skip


class Request:
    """A request that the engine has accepted.

    Args:
        request_id: the engine's own number for it.
        prompt_token_ids: int32.
        params: with `max_tokens` and `seed` set.
        end_token_ids: ids that end a sample.
        tokenizer: the model's.
        sink: who takes its events.
        stream: whether the sink wants deltas.
        starts_text: the output is a text of its own (a chat's answer) instead of continuing the prompt.
        timings: has the time of arrival.
        pooling: for a request for an embedding: which one of POOLINGS.
        name: the client's name for it, for the log.
        client_key: identifies the client.

    Attributes:
        first: its first sample; most requests have no other.
        message: the message that tells the scheduler of it.
        was_sent: a scheduler has had it, so the next one has to know its output so far.
        sent_count: output tokens that it had when it was last sent; -1 if no scheduler has it now.
        waits: it is in the scheduler's queue; no worker has heard of it.
        fruitless_count: how often it was lost since its last token, not counting losses while it waited.
    """

    __slots__ = (
        "cached_count", "client_key", "embedding", "end_token_ids", "first", "fruitless_count", "message", "name",
        "open_count", "params", "pooling", "prompt_logprobs", "prompt_token_ids", "request_id", "samples", "sent_count",
        "sink", "starts_text", "stops", "stream", "timings", "tokenizer", "waits", "was_sent",
    )  # fmt: skip

    def __init__(
        self,
        *,
        request_id: int,
        prompt_token_ids: "array[int]",
        params: SamplingParams,
        end_token_ids: Iterable[int],
        tokenizer: Tokenizer,
        sink: Sink,
        stream: bool,
        starts_text: bool,
        timings: Timings,
        name: str = "",
        pooling: str = "",
        client_key: str = "",
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.end_token_ids = frozenset(end_token_ids)
        self.tokenizer = tokenizer
        self.sink = sink
        self.stream = stream
        self.starts_text = starts_text
        self.timings = timings
        self.name = name
        self.pooling = pooling
        self.embedding: array[float] | None = None
        self.client_key = client_key
        self.stops = StopStrings(params.stop) if params.stop else None
        self.cached_count = 0
        self.prompt_logprobs = None if params.prompt_logprobs is None else self._empty_prompt_logprobs()
        self.samples = [Sample(self, index) for index in range(params.n)]
        self.first = self.samples[0]
        self.open_count = params.n
        self.message: AddRequest | None = None
        self.was_sent = False
        self.sent_count = -1
        self.waits = False
        self.fruitless_count = 0

    @property
    def output_count(self) -> int:
        """Tokens of all samples so far."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def began_before(self) -> bool:
        """Whether some of its tokens came to an earlier frontend, which alone knew when it began."""
        return any(sample.known_count for sample in self.samples)

    @property
    def last_token_s(self) -> float | None:
        """When the last token of any sample came; None before the first."""
        return max((s.last_token_s for s in self.samples if s.last_token_s is not None), default=None)

    def take_up(self, samples: Iterable[SampleSoFar]) -> None:
        """Go on from what its client has of it, for which an earlier frontend had sent it."""
        self.was_sent = True
        for known in samples:
            self.samples[known.index].take_up(known)
        self.open_count = sum(sample.finish_reason is None for sample in self.samples)

    def continued_message(self) -> AddRequest:
        """The message for the scheduler; with the output so far, if the request was sent before."""
        assert self.message is not None, f"request {self.request_id} has no message"
        if not self.was_sent:
            return self.message
        outputs = tuple(None if s.finish_reason is not None else s.token_ids for s in self.samples)
        return dataclasses.replace(self.message, outputs=outputs)

    def emit(
        self,
        sample: Sample,
        text: str,
        token_ids: Sequence[int],
        interval: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """Hand the sink a sample's new output, gathered to deltas of `interval` tokens but for the first and last."""
        delta = sample.pending
        if delta is None:
            delta = Delta(sample.index, text, array("i", token_ids), list(logprobs))
        else:
            delta.extend(text, token_ids, logprobs)
        first = len(delta.token_ids) == len(sample.token_ids)
        if sample.finish_reason is None and not first and len(delta.token_ids) < interval:
            sample.pending = delta
            return
        sample.pending = None
        delta.finish_reason, delta.stop_reason = sample.finish_reason, sample.stop_reason
        self.sink.on_delta(delta)

    def note_loss(self) -> int:
        """Scheduler or worker were lost; returns how often while they worked on this request, since its last token."""
        if self.sent_count >= 0 and not self.waits:
            self.fruitless_count = self.fruitless_count + 1 if self.output_count == self.sent_count else 0
        self.sent_count, self.waits = -1, False
        return self.fruitless_count

    def _empty_prompt_logprobs(self) -> PromptLogprobs:
        detokenizer = partial(self.tokenizer.detokenizer, skip_special_tokens=False)
        return PromptLogprobs(self.prompt_token_ids, detokenizer, self.describe)

    def describe(self, token_id: int, text: str, entry: TokenLogprobs) -> TokenLogprob:
        """A reported log probability, with the tokens' texts."""
        tokenizer = self.tokenizer
        top = tuple(
            TopLogprob(top_id, tokenizer.token_text(top_id), tokenizer.token_bytes(top_id), logprob, rank)
            for rank, (top_id, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=False), 1)
        )
        return TokenLogprob(token_id, text, tokenizer.token_bytes(token_id), entry.logprob, entry.rank, top)

    @property
    def preemption_count(self) -> int:
        """How often its samples were preempted and resumed."""
        return sum(sample.preemption_count for sample in self.samples)

    def mean_gap_s(self) -> float | None:
        """Mean seconds between the tokens that came to this frontend, of the longest sample; None if none has two."""
        longest = max(len(sample.token_ids) - sample.known_count for sample in self.samples)
        decode_s = self.timings.decode_s
        return None if longest < 2 or decode_s is None else decode_s / (longest - 1)

    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(len(self.prompt_token_ids), self.output_count, self.cached_count)

    def final(self) -> Final:
        """The whole request, once every sample has ended."""
        samples = tuple(sample.result() for sample in self.samples)
        return Final(
            samples, self.usage(), self.prompt_token_ids, self.prompt_logprobs, self.timings, self.embedding
        )  # fmt: skip


def error_of(message: RequestFailed) -> RequestError:
    """The scheduler's refusal or failure of a request, as its client gets it."""
    return RequestError(
        message.message,
        code=message.error_code,
        param=message.param,
        status=message.status,
        retry_after_ms=message.retry_after_ms,
    )
