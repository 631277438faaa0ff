"""The rows of a TokensOut message, one by one, and what the end of a row means for the text.

Pure functions; `token_intake` has them set apart the rows that are more than one token of a request's first sample.
"""

import math
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, repeat

from common.messages import SampleFinish, TokenLogprobs, TokensOut
from frontend.request import Request

NOBODY = -1
"""No request's number."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of TokensOut with everything that belongs to it; `logprobs` by index into `token_ids`.

    Of what only some rows have, the others hold 0, -1 for `prefill_us`.
    """

    request_id: int
    sample_index: int
    token_ids: Sequence[int]
    finish: SampleFinish | None
    cached_count: int
    prefill_us: int
    preemption_count: int
    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    embedding: "array[float] | None" = None


def set_apart(out: TokensOut) -> "tuple[array[int], set[int]]":
    """Set apart the rows that are more than one token of a request's first sample, in a message without counts.

    Returns:
        The request ids, int32, with nobody's in place of such rows, and the indices of those.
    """
    special = _special_rows(out)
    if not special:
        return out.request_ids, special
    request_ids = out.request_ids[:]
    for index in special:
        request_ids[index] = NOBODY
    return request_ids, special


def _special_rows(out: TokensOut) -> set[int]:
    if not (
        out.finishes or out.logprobs or out.prompt_logprobs or out.embeddings or out.sample_indices
        or out.preemption_counts or out.cached_counts or out.prefill_us
    ):  # fmt: skip
        return set()
    special = {finish.row_index for finish in out.finishes} | {entry.row_index for entry in out.logprobs}
    special.update(index for index, _ in (*out.prompt_logprobs, *out.embeddings))
    for mostly_zero in (out.sample_indices, out.preemption_counts):
        special.update([index for index, value in enumerate(mostly_zero) if value])
    for mostly_negative in (out.cached_counts, out.prefill_us):
        special.update([index for index, value in enumerate(mostly_negative) if value >= 0])
    return {index for index in special if index < len(out.request_ids)}


def rows_of(out: TokensOut, special: Collection[int] | None = None) -> Iterator[Row]:
    """The rows of a message in order: all, or those that were set apart."""
    if special is not None and not special:
        return
    finishes = {finish.row_index: finish for finish in out.finishes}
    prompt_logprobs = dict(out.prompt_logprobs)
    embeddings = dict(out.embeddings)
    logprobs = {entry.row_index: entry for entry in out.logprobs}
    spans = _spans(out) if special is None else ((index, index, index + 1) for index in sorted(special))
    for index, start, end in spans:
        yield Row(
            out.request_ids[index],
            out.sample_indices[index] if out.sample_indices else 0,
            out.token_ids[start:end],
            finishes.get(index),
            out.cached_counts[index] if out.cached_counts else 0,
            out.prefill_us[index] if out.prefill_us else -1,
            out.preemption_counts[index] if out.preemption_counts else 0,
            {at - start: logprobs[at] for at in range(start, end) if at in logprobs} if logprobs else {},
            prompt_logprobs.get(index, ()),
            embeddings.get(index),
        )


def _spans(out: TokensOut) -> Iterator[tuple[int, int, int]]:
    """Each row's index, and the indices of its first token and of the one after its last."""
    ends = [*accumulate(out.token_counts or repeat(1, len(out.request_ids)))]
    return zip(count(), [0, *ends], ends, strict=False)


def note_beginning(request: Request, row: Row) -> None:
    """Take what a sample's first rows tell of its prompt and of how it came to run."""
    request.cached_count = max(request.cached_count, row.cached_count)
    if row.prompt_logprobs and request.prompt_logprobs is not None:
        request.prompt_logprobs.add(row.prompt_logprobs)
    sample = request.samples[row.sample_index]
    sample.preemption_count = max(sample.preemption_count, row.preemption_count)
    if row.prefill_us >= 0 and request.timings.prefill_s is None:
        request.timings.prefill_s = row.prefill_us / 1e6


def is_sound(embedding: Sequence[float] | None) -> bool:
    """Whether there is an embedding and all of it is numbers."""
    return embedding is not None and math.isfinite(math.hypot(*embedding))


def silent_index(request: Request, row: Row) -> int:
    """Which token is an end token that the text leaves out; -1 for none."""
    if row.finish is None or row.finish.reason != "stop" or request.params.include_stop_str_in_output:
        return -1
    return len(row.token_ids) - 1 if row.token_ids and row.token_ids[-1] in request.end_token_ids else -1


def stop_token(request: Request, row: Row) -> int | None:
    """The stop token id that ended the sample, if it was one that the client named."""
    ended_by = row.token_ids[-1] if row.finish and row.finish.reason == "stop" and row.token_ids else None
    return ended_by if ended_by in request.params.stop_token_ids else None
