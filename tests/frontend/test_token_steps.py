"""Steps of many rows: each sample gets the same from the loop that takes nearly every token as the general way."""

import dataclasses
import re
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import messages as m
from common.sampling_params import SamplingParams
from frontend import pieces
from frontend.core import Core
from frontend.events import Final
from frontend.pieces import Piece, PiecesWithout, PieceTable
from frontend.token_intake import TokenIntake
from frontend.token_rows import NOBODY, rows_of, set_apart
from tests.support.frontend_in_memory import Events

LIMITS = m.EngineReady(max_model_len=2048, max_num_seqs=256, block_size=16, block_count=4096, vocab_size=400)
KINDS = [
    {}, {"n": 2}, {"stop": ("!", "ab")}, {"detokenize": False}, {"skip_special_tokens": False},
    {"include_stop_str_in_output": True, "stop": "s"},
]  # fmt: skip
TOKENS = st.one_of(st.integers(0, 320), st.sampled_from([70, 71, 72]))
"""Of the small tokenizers: single bytes, words, special tokens; and some that come again and again."""


class Clock:
    """Monotonic seconds, one more for each step."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Run:
    """One core with some requests.

    Args:
        kinds: for each request its parameters, whether it streams, and whether its text starts anew.
        is_general: every step names the count of each row's tokens, so that all rows go the general way.
    """

    def __init__(self, tokenizer, kinds, interval: int, *, is_general: bool) -> None:
        self.clock = Clock()
        self.sent: list[bytes] = []
        self.core = Core(
            tokenizer, self.sent.append, stream_interval=interval, clock=self.clock, wall_clock=self.clock
        )  # fmt: skip
        self.core.handle(LIMITS)
        self.everything = []
        self._is_general = is_general
        for params, stream, starts_text in kinds:
            events = Events()
            sampling = SamplingParams(max_tokens=500, seed=1, **params)
            self.core.submit(array("i", [5]), sampling, events, stream=stream, starts_text=starts_text)
            self.everything.append(events)

    def step(self, rows, abort: int | None) -> None:
        """Rows are (request, sample, token, finish, cached tokens)."""
        self.clock.now_s += 1.0
        numbers, samples, token_ids, finishes, cached = zip(*rows, strict=True)
        self.core.handle(
            m.TokensOut(
                request_ids=array("i", numbers),
                token_ids=array("i", token_ids),
                sample_indices=array("B", samples if any(samples) else ()),
                token_counts=array("B", [1] * len(rows) if self._is_general else ()),
                cached_counts=array("i", cached if max(cached) >= 0 else ()),
                finishes=tuple(m.SampleFinish(row, reason) for row, reason in enumerate(finishes) if reason),
            )
        )
        if abort is not None:
            self.core.abort(abort)

    def outcome(self) -> dict:
        """All that clients and the scheduler were told, each sample by itself, and what was counted."""
        ends = [
            [(each.samples, each.usage, each.timings) if isinstance(each, Final) else str(each) for each in events.ends]
            for events in self.everything
        ]
        figures = self.core.figures
        return {
            "deltas": [
                [dataclasses.asdict(delta) for delta in sorted(events.deltas, key=lambda delta: delta.sample_index)]
                for events in self.everything
            ],
            "ends": ends,
            "sent": sorted(self.sent),
            "gaps": (figures.gap_s.counts, figures.gap_s.total, figures.first_token_s.counts),
            "tokens": self.core.token_count,
        }


@st.composite
def courses(draw):
    """Requests, and steps with at most one row for each of their samples."""
    kinds = draw(
        st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from([True, True, False]), st.booleans()), min_size=1)
    )
    places = [(number, index) for number, (params, _, _) in enumerate(kinds) for index in range(params.get("n", 1))]
    row = st.tuples(
        TOKENS,
        st.sampled_from(["", "", "", "", "", "", "stop", "length"]),
        st.sampled_from([-1, -1, -1, 2]),
    )
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        rows = [(*place, *draw(row)) for place in draw(st.lists(st.sampled_from(places), min_size=1, unique=True))]
        steps.append((rows, draw(st.sampled_from([None, None, None, 0]))))
    return kinds, steps


def check_both_ways(tokenizer, course, interval: int) -> None:
    kinds, steps = course
    runs = [Run(tokenizer, kinds, interval, is_general=is_general) for is_general in (False, True)]
    for run in runs:
        for rows, abort in steps:
            run.step(rows, abort)
        run.core.fail_all("over")
    assert runs[0].outcome() == runs[1].outcome()


@given(course=courses(), interval=st.sampled_from([1, 1, 3]))
def test_byte_level_tokens_give_the_same_either_way(byte_tokenizer, course, interval):
    check_both_ways(byte_tokenizer, course, interval)


@given(course=courses())
def test_sentencepiece_tokens_give_the_same_either_way(fallback_tokenizer, course):
    check_both_ways(fallback_tokenizer, course, 1)


def test_the_usual_token_does_not_go_the_general_way(byte_tokenizer, monkeypatch):
    """Also beside rows of other kinds: in a busy engine some request begins or ends in most steps."""
    params = [{}, {"stop": ("zq", "q")}, {"detokenize": False}, {"n": 2}]
    kinds = [(each, True, False) for each in params]
    run = Run(byte_tokenizer, kinds, 1, is_general=False)
    first = [(number, 0, 70, "", 0) for number in range(4)]
    run.step([*first, (3, 1, 70, "", 0)], None)
    monkeypatch.setattr(TokenIntake, "_extend_by_one", None)
    ends = [(2, 0, 70, "length", -1), (3, 1, 72, "", -1)]
    run.step([*((number, 0, 70, "", -1) for number in range(2)), *ends, (3, 0, 71, "", -1)], None)
    assert [len(events.deltas) for events in run.everything] == [2, 2, 2, 4]
    assert len(run.everything[2].ends) == 1


def test_a_table_of_pieces_stays_small_and_right(monkeypatch):
    monkeypatch.setattr(pieces, "PIECES_LIMIT", 100)
    table = PieceTable(lambda token_id: b"%d" % token_id if token_id % 7 else b"\xff")
    for token_id in [*range(350), 3, 7, 349]:
        piece = table[token_id]
        assert (piece is None) == (token_id % 7 == 0)
        assert piece is None or (piece.token_id, piece.text) == (token_id, str(token_id))
        assert len(table) <= 100
    assert table[3] is table[3], "one object for all streams"
    without = PiecesWithout(table, re.compile("[34]"))
    assert [without[token_id] is not None for token_id in (3, 5, 7, 24, 25)] == [False, True, False, False, True]
    assert without[5] is table[5]
    assert all(without[token_id] is None or len(without) <= 100 for token_id in range(500))


def test_a_piece_is_packed_once():
    piece = Piece(70, "sea")
    assert piece.row_end == b""
    assert piece.pack_row_end() is piece.row_end


ENTRY = m.TokenLogprobs(1, -0.5, 1, array("i"), array("f"))


@pytest.mark.parametrize(
    "more",
    [
        {"finishes": (m.SampleFinish(1, "length"),)},
        {"logprobs": (ENTRY,)},
        {"prompt_logprobs": ((1, (ENTRY,)),)},
        {"embeddings": ((1, array("f", [1.0])),)},
        {"sample_indices": array("B", [0, 1, 0])},
        {"preemption_counts": array("B", [0, 1, 0])},
        {"cached_counts": array("i", [-1, 0, -1])},
        {"prefill_us": array("i", [-1, 0, -1])},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_row_with_anything_more_than_a_token_is_set_apart(more):
    """A zero that says something counts too: no token came from the cache, the prompt took less than a microsecond."""
    out = m.TokensOut(request_ids=array("i", [7, 8, 9]), token_ids=array("i", [70, 71, 72]), **more)
    request_ids, special = set_apart(out)
    assert (list(request_ids), special) == ([7, NOBODY, 9], {1})
    (row,) = rows_of(out, special)
    assert (row.request_id, list(row.token_ids)) == (8, [71])


def test_an_end_of_a_row_that_is_not_there_ends_nobody(byte_tokenizer):
    run = Run(byte_tokenizer, [({}, True, False)], 1, is_general=False)
    step = m.TokensOut(request_ids=array("i", [0]), token_ids=array("i", [70]), finishes=(m.SampleFinish(1, "length"),))
    run.core.handle(step)
    assert (len(run.everything[0].deltas), run.everything[0].ends) == (1, [])
