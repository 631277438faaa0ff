"""Applies a step's result to the scheduler's state and writes the message that tells the frontend of it.

Drops the tokens of sequences that have ended meanwhile, and tokens past an end token; they are counted nowhere. Called
by the core.
"""

from array import array
from collections.abc import Sequence as SequenceABC
from dataclasses import replace

from common.errors import TriremeError
from common.messages import NOT_A_TOKEN, SampleFinish, StepResult, TokenLogprobs, TokensOut
from common.wire import INT32_MAX
from scheduler_proc.grammar import Grammar, GrammarError
from scheduler_proc.sequence import Sequence, Status
from scheduler_proc.state import Flight, State


class ResultError(TriremeError):
    """A worker's result does not belong to the plans that were sent: the two processes disagree and cannot go on."""


class Rows:
    """The rows of a TokensOut under construction.

    Attributes:
        sequences: one per row.
        token_ids: the rows' tokens one after another.
        token_counts: tokens per row; empty while each has one.
        sources: for each token, its place in the result; empty when nobody asks.
        finishes: as in TokensOut.
    """

    __slots__ = ("finishes", "sequences", "sources", "token_counts", "token_ids")

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.token_ids: list[int] = []
        self.token_counts: list[int] = []
        self.sources: list[int] = []
        self.finishes: list[SampleFinish] = []


class Collector:
    """Turns results into messages.

    Args:
        state: the scheduler's.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._block_size = state.limits.block_size

    def apply(self, result: StepResult, now_s: float) -> TokensOut | None:
        """Take in the oldest plan's result, which came at `now_s`; None when nobody has to hear of it.

        Raises:
            ResultError: it is not that plan's, or its counts do not fit it.
        """
        flight = self._take_flight(result)
        if result.prompt_logprobs:
            _keep_prompt_logprobs(flight, result)
        rows = Rows()
        several = self._state.several_samples_count > 0
        if result.token_counts or result.logprobs or NOT_A_TOKEN in result.token_ids:
            self._apply_any(rows, flight, result)
        else:
            self._apply_single(rows, flight.sampled, result.token_ids)
        return self._message(rows, flight, result, several, now_s) if rows.sequences else None

    def _take_flight(self, result: StepResult) -> Flight:
        state = self._state
        expected = state.in_flight[0].step_id if state.in_flight else 0
        if result.step_id != expected:
            raise ResultError(f"the worker reports step {result.step_id}; the oldest in flight is {expected} (0: none)")
        flight = state.in_flight[0]
        counted = sum(result.token_counts) if result.token_counts else len(flight.sampled)
        if counted != len(result.token_ids) or (
            result.token_counts and len(result.token_counts) != len(flight.sampled)
        ):
            raise ResultError(
                f"the worker reports {len(result.token_ids)} tokens for step {result.step_id}, which samples "
                f"{len(flight.sampled)} slots"
            )
        state.in_flight.popleft()
        state.land(flight)
        return flight

    # ---- rows

    def _apply_single(self, rows: Rows, sampled: list[Sequence], token_ids: SequenceABC[int]) -> None:
        """One token for each sequence, all of them token ids: the usual case, kept short."""
        done = Status.DONE
        add_sequence, add_token = rows.sequences.append, rows.token_ids.append
        for sequence, token in zip(sampled, token_ids, strict=True):
            if sequence.status is done:
                continue
            tokens = sequence.tokens
            tokens.append(token)
            add_sequence(sequence)
            add_token(token)
            if len(tokens) >= sequence.next_event_len or token in sequence.end_token_ids:
                self._after_token(rows, sequence, token)

    def _apply_any(self, rows: Rows, flight: Flight, result: StepResult) -> None:
        """Any number of tokens for each sequence, some of which may be NOT_A_TOKEN.

        If a sequence's logits were not numbers, its K/V may not be either, so nobody may find it in the prefix cache.
        """
        counts = result.token_counts or array("B", b"\1") * len(flight.sampled)
        start = 0
        broken = []
        for sequence, count in zip(flight.sampled, counts, strict=True):
            if NOT_A_TOKEN in result.token_ids[start : start + count]:
                broken.append(sequence)
            if sequence.status is not Status.DONE:
                rows.sequences.append(sequence)
                rows.token_counts.append(self._apply_tokens(rows, sequence, result.token_ids, start, count))
            start += count
        if broken:
            self._state.uncache(broken)

    def _apply_tokens(self, rows: Rows, sequence: Sequence, token_ids: SequenceABC[int], start: int, count: int) -> int:
        """The row's tokens, up to its end; the number taken."""
        for taken in range(count):
            token = token_ids[start + taken]
            if token == NOT_A_TOKEN:
                detail = "the model's output for this sample was not a number"
                self._finish(rows, sequence, "error", detail, reusable=False)
                return taken
            sequence.tokens.append(token)
            rows.token_ids.append(token)
            rows.sources.append(start + taken)
            if len(sequence.tokens) >= sequence.next_event_len or token in sequence.end_token_ids:
                self._after_token(rows, sequence, token)
                if sequence.status is Status.DONE:
                    return taken + 1
        return count

    def _after_token(self, rows: Rows, sequence: Sequence, token: int) -> None:
        """Handle a token that ends the sample, completes a block or advances a grammar."""
        length = len(sequence.tokens)
        if token in sequence.end_token_ids:
            self._finish(rows, sequence, "stop")
        elif sequence.grammar is not None and not self._follow(rows, sequence, sequence.grammar, token):
            return
        elif length >= sequence.max_len:
            self._finish(rows, sequence, "length")
        elif sequence.blocks:
            # the last token's K/V may not be computed yet, all before it is
            self._state.cache.insert(sequence.chain, sequence.tokens, sequence.blocks, length - 1)
            sequence.expect_block(self._block_size)

    def _follow(self, rows: Rows, sequence: Sequence, grammar: Grammar, token: int) -> bool:
        """Advance the grammar by the token; False if the sample ends with it."""
        try:
            goes_on = grammar.advance(token)
        except GrammarError as error:
            self._finish(rows, sequence, "error", f"the grammar cannot be followed: {error}")
            return False
        if not goes_on:
            self._finish(rows, sequence, "stop")
        return goes_on

    def _finish(self, rows: Rows, sequence: Sequence, reason: str, detail: str = "", *, reusable: bool = True) -> None:
        rows.finishes.append(SampleFinish(len(rows.sequences) - 1, reason, detail))
        self._state.end(sequence, reusable=reusable)

    # ---- the message

    def _message(self, rows: Rows, flight: Flight, result: StepResult, several: bool, now_s: float) -> TokensOut:
        sequences = rows.sequences
        embeddings = _embeddings(sequences, flight, result) if result.embeddings else ()
        self._state.counters.output_tokens += len(rows.token_ids) - len(embeddings)
        has_first_tokens = len(flight.sampled) > flight.decode_count
        new = _new_sequences(flight, sequences) if has_first_tokens else []
        return TokensOut(
            request_ids=array("i", [s.request_id for s in sequences]),
            token_ids=array("i", rows.token_ids),
            sample_indices=array("B", [s.sample_index for s in sequences] if several else ()),
            token_counts=array("B", () if rows.token_counts.count(1) == len(rows.token_counts) else rows.token_counts),
            prompt_logprobs=_first_prompt_logprobs(sequences) if has_first_tokens else (),
            prefill_us=_first_prefill_us(new, len(sequences), now_s),
            preemption_counts=_preemption_counts(new, len(sequences)),
            cached_counts=_first_cached_counts(new, len(sequences)),
            finishes=tuple(rows.finishes),
            logprobs=_moved_logprobs(rows.sources, result.logprobs),
            embeddings=embeddings,
        )


def _embeddings(
    sequences: list[Sequence], flight: Flight, result: StepResult
) -> "tuple[tuple[int, array[float]], ...]":
    """By row instead of by slot; those of sequences that are over by now are dropped."""
    rows = {id(sequence): row_index for row_index, sequence in enumerate(sequences)}
    found = [(rows.get(id(flight.chunk_sequences.get(slot)), -1), vector) for slot, vector in result.embeddings]
    return tuple((row_index, vector) for row_index, vector in found if row_index >= 0)


def _keep_prompt_logprobs(flight: Flight, result: StepResult) -> None:
    for slot, entries in result.prompt_logprobs:
        sequence = flight.chunk_sequences.get(slot)
        if sequence is not None and sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs.update((entry.row_index, entry) for entry in entries)


def _first_prompt_logprobs(sequences: list[Sequence]) -> tuple[tuple[int, tuple[TokenLogprobs, ...]], ...]:
    found = []
    for row_index, sequence in enumerate(sequences):
        if sequence.prompt_logprobs is not None:
            by_position, sequence.prompt_logprobs = sequence.prompt_logprobs, None
            found.append((row_index, tuple(by_position[position] for position in sorted(by_position))))
    return tuple(found)


def _new_sequences(flight: Flight, sequences: list[Sequence]) -> list[Sequence]:
    """The sequences with their first token since they got a slot: the last rows, since decode rows come first."""
    sampled = set(flight.sampled[flight.decode_count :])
    count = 0
    while count < len(sequences) and sequences[-1 - count] in sampled:
        count += 1
    return sequences[len(sequences) - count :]


def _first_prefill_us(new: list[Sequence], row_count: int, now_s: float) -> "array[int]":
    """How long prefill took, for rows with a sample's very first token (`cached_count` is not reported yet)."""
    if all(sequence.cached_count < 0 for sequence in new):
        return array("i")
    times = [-1 if s.cached_count < 0 else max(0, min(int((now_s - s.started_at_s) * 1e6), INT32_MAX)) for s in new]
    return array("i", [-1]) * (row_count - len(new)) + array("i", times)


def _preemption_counts(new: list[Sequence], row_count: int) -> "array[int]":
    """How often the samples that run again had been preempted."""
    if not any(sequence.preemption_count for sequence in new):
        return array("B")
    return array("B", bytes(row_count - len(new))) + array("B", [min(s.preemption_count, 255) for s in new])


def _first_cached_counts(new: list[Sequence], row_count: int) -> "array[int]":
    """Prompt tokens that came from the cache, of samples whose first token this is."""
    counts = [sequence.cached_count for sequence in new]
    if counts.count(-1) == len(counts):
        return array("i")
    for sequence in new:
        sequence.cached_count = -1
    return array("i", [-1]) * (row_count - len(new)) + array("i", counts)


def _moved_logprobs(sources: list[int], entries: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
    if not entries:
        return ()
    place = {source: index for index, source in enumerate(sources)}
    return tuple(replace(e, row_index=place[e.row_index]) for e in entries if e.row_index in place)
