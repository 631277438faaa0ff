"""Sampling against a sorting reference, by distribution, and by the faults that samplers have had."""

from dataclasses import dataclass, fields, replace

import pytest
import torch

from kernels import sampling_state as columns
from kernels.noise import gumbel_reference, noise_bits_reference
from kernels.sampling import (
    SampledTokens,
    adjusted_reference,
    kept_reference,
    launch_plan,
    logprobs_reference,
    sample,
    sample_reference,
)
from kernels.sampling_state import (
    ALLOWED_ROW,
    BAD_WORD_COUNT,
    BANNED_COUNT,
    BANNED_UNTIL,
    BIAS_COUNT,
    CHUNK,
    COUNT_ROW,
    FREQUENCY,
    LOGPROB_COUNT,
    MIN_P,
    PRESENCE,
    REPETITION,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplingState,
    SamplingWorkspace,
    fill_counts,
)
from tests.kernels.closeness import DEVICE, random_tensor

# The interpreter computes both sides of a `where`; NumPy warns about the side that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

MAX_LENGTH = 64
NUMBERS = {"temperature": TEMPERATURE, "top_p": TOP_P, "min_p": MIN_P, "repetition": REPETITION,
           "presence": PRESENCE, "frequency": FREQUENCY}  # fmt: skip


@dataclass
class Bench:
    """Slots, buffers and one launch; row r samples with slot `rows - 1 - r` so that rows and slots differ."""

    rows: int
    columns: int
    vocabulary: int
    top_count: int = 8

    def __post_init__(self) -> None:
        self.state = SamplingState.allocate(self.rows, self.columns, DEVICE, max_bias=8, max_banned=8)
        self.workspace = SamplingWorkspace.allocate(self.rows, self.vocabulary, DEVICE)
        self.known = torch.full((self.rows,), 10, dtype=torch.int32, device=DEVICE)
        self.slot_token_ids = torch.zeros(self.rows, MAX_LENGTH, dtype=torch.int32, device=DEVICE)
        self.row_slots = torch.arange(self.rows - 1, -1, -1, dtype=torch.int32, device=DEVICE)
        self.sample_rows = torch.arange(self.rows, dtype=torch.int32, device=DEVICE)
        self.out = SampledTokens.allocate(self.rows, self.top_count, DEVICE)

    def set(self, row: int, *, top_k=0, seed=0, logprobs=-1, bias=None, banned=(), banned_until=0, prompt=None,
            output=(), allowed=None, bad_words=(), **numbers) -> int:  # fmt: skip
        """Set how a row samples; returns its slot."""
        slot = int(self.row_slots[row])
        for name, value in numbers.items():
            self.state.numbers[slot, NUMBERS[name]] = value
        choices = self.state.choices[slot]
        choices[TOP_K], choices[LOGPROB_COUNT], choices[BANNED_UNTIL] = top_k, logprobs, banned_until
        choices[SEED_LOW] = (seed & 0xFFFFFFFF) - ((seed & 0x80000000) << 1)
        choices[SEED_HIGH] = seed >> 32
        choices[BANNED_COUNT], choices[BIAS_COUNT] = len(banned), len(bias or {})
        for j, token_id in enumerate(banned):
            self.state.banned_ids[slot, j] = token_id
        for j, (token_id, value) in enumerate((bias or {}).items()):
            self.state.bias_ids[slot, j], self.state.bias_values[slot, j] = token_id, value
        choices[BAD_WORD_COUNT] = len(bad_words)
        for j, word in enumerate(bad_words):
            self.state.bad_words[slot, j, : len(word) + 1] = torch.tensor([len(word), *word])
        if allowed is not None:
            choices[ALLOWED_ROW] = slot
            for token_id in allowed:
                self.state.allowed[slot, token_id // 32] |= (1 << (token_id % 32)) - ((token_id % 32 == 31) << 32)
        if prompt is not None:
            choices[COUNT_ROW] = slot
            ids = torch.tensor([*prompt, *output], dtype=torch.int32, device=DEVICE)
            fill_counts(self.state.counts[slot], ids, len(prompt))
        return slot

    def launch(self, logits: torch.Tensor) -> list[int]:
        sample(logits, self.row_slots, self.sample_rows, self.known, self.slot_token_ids, self.state, self.workspace,
               self.out, self.vocabulary)  # fmt: skip
        assert (self.workspace.tickets == 0).all() and (self.workspace.bins == 0).all()
        return self.out.ids.tolist()

    def want(self, logits: torch.Tensor) -> list[int]:
        """The reference's tokens; call it before `launch`, which changes counts and lengths."""
        cpu = SamplingState(*(getattr(self.state, item.name).cpu() for item in fields(self.state)))
        rows = logits[:, : self.vocabulary].cpu()
        return [
            sample_reference(rows[row], slot, self.slot_token_ids[slot, : self.known[slot]].cpu(), cpu)
            for row, slot in enumerate(self.row_slots.tolist())
        ]


def logits_of(rows: int, columns: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return random_tensor(rows, columns, seed=seed, scale=scale)


SETTINGS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 0.02, "top_k": 5, "top_p": 0.5},
    {"temperature": 2.0, "top_k": 3000},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.0, "repetition": 2.0, "prompt": [1, 2, 3], "output": [4, 4]},
    {"temperature": 0.9, "frequency": 0.5, "presence": 0.25, "prompt": [7], "output": [9, 9, 11], "top_p": 0.95},
    {"bias": {5: 100.0, 6: -100.0}, "temperature": 1.0, "top_k": 2},
    {"banned": [3, 17], "banned_until": 11, "temperature": 1.0, "min_p": 1.0},
    {"banned": [3, 17], "banned_until": 10},
    {"allowed": [0, 31, 32, 36], "temperature": 1.0},
    {"allowed": [31]},
    {"bad_words": [[5], [0, 0, 9], [1, 7]], "bias": {5: 50.0, 9: 40.0, 7: 30.0}},
]


@pytest.mark.parametrize("vocabulary", [37, CHUNK, 2 * CHUNK + 5])
def test_every_setting_in_one_batch_equals_the_reference(vocabulary):
    bench = Bench(len(SETTINGS), vocabulary + 11, vocabulary)
    for row, setting in enumerate(SETTINGS):
        bench.set(row, seed=row * 0x1_0000_0001 + 5, **setting)
    logits = logits_of(len(SETTINGS), vocabulary + 11)
    logits[:, vocabulary:] = 1e9  # ids that the tokenizer lacks
    for _ in range(1 if vocabulary == CHUNK else 3 if vocabulary < CHUNK else 2):
        want = bench.want(logits)
        assert bench.launch(logits) == want


def test_programs_that_scan_several_chunks_choose_the_same(monkeypatch):
    """Two programs a row, for two chunks and for three."""
    settings = [SETTINGS[1], SETTINGS[3], SETTINGS[14], {"logprobs": 3}]
    monkeypatch.setattr("kernels.sampling.SCAN_PROGRAMS", 2 * len(settings))
    vocabulary = 4 * CHUNK + 5
    bench = Bench(len(settings), vocabulary, vocabulary)
    for row, setting in enumerate(settings):
        bench.set(row, seed=row + 77, **setting)
    logits = logits_of(len(settings), vocabulary, seed=3)
    want = bench.want(logits)
    assert bench.launch(logits) == want
    assert bench.out.top_ids[3, :3].tolist() == logits[3].topk(3).indices.tolist()


def test_the_best_score_need_not_lie_in_the_piece_with_the_best_bound():
    """Two ids in two pieces, with logits that give the second the better bound: it says little where noise is small."""
    rows, vocabulary, pair = 16, 600, torch.tensor([5, 300])
    logits = torch.full((rows, vocabulary), float("-inf"), device=DEVICE)
    bits = noise_bits_reference(torch.arange(rows)[:, None], torch.tensor(10), pair)
    bench = Bench(rows, vocabulary, vocabulary)
    for row, (first, second) in enumerate((bits + 0.5).log().tolist()):
        logits[row, 5], logits[row, 300] = 2.0, 2.01 + second - first
        bench.set(row, seed=row, temperature=1.0)
    want = bench.want(logits)
    assert 0 < want.count(5) < rows, "either must win in some rows"
    assert bench.launch(logits) == want


@pytest.mark.parametrize(("room", "levels"), [(16, 0), (1, 0), (16, 4), (512, 0)])
def test_more_candidates_than_fit_are_searched_in_the_row(room, levels):
    """The interval that top-p's threshold lies in fits (16), or does not (1), or holds one value many times; 512
    candidates are too few as well."""
    vocabulary = CHUNK + 300
    bench = Bench(len(SETTINGS), vocabulary, vocabulary)
    names = ("candidates", "candidate_ids", "interval")
    few = {name: getattr(bench.workspace, name)[:, :room].clone() for name in names}
    bench.workspace = replace(bench.workspace, **few)
    for row, setting in enumerate(SETTINGS):
        bench.set(row, seed=row, **setting)
    logits = logits_of(len(SETTINGS), vocabulary, scale=0.3)
    if levels:
        logits = (logits * levels).round() / levels
    want = bench.want(logits)
    assert bench.launch(logits) == want


@pytest.mark.parametrize(("deviation", "in_one"), [(0.02, "few hundred"), (0.0005, "more than are searched")])
def test_top_p_ends_among_values_that_lie_close_together(deviation, in_one):
    """One large value, and all others in a heap below it: intervals of a few hundred values, or of nearly all."""
    vocabulary = CHUNK + 300
    bench = Bench(4, vocabulary, vocabulary)
    logits = logits_of(4, vocabulary, scale=deviation) - 5
    logits[:, 7] = 0.0
    for row, top_p in enumerate((0.2, 0.5, 0.9, 0.999)):
        bench.set(row, seed=row, temperature=1.0, top_p=top_p)
    want = bench.want(logits)
    assert bench.launch(logits) == want, in_one


def test_each_row_equals_its_solo_run():
    """Fault B1 in both orders: settings stay with their rows, whatever the neighbours use."""
    settings = [
        {"repetition": 2.0, "prompt": [1, 2]},
        {"temperature": 1.0, "seed": 99, "top_k": 1},
        {"temperature": 1.5},
    ]
    logits = logits_of(3, 50)
    alone = []
    for row, setting in enumerate(settings):
        bench = Bench(1, 50, 50)
        bench.set(0, **setting)
        alone.append(bench.launch(logits[row : row + 1])[0])
    for order in ([0, 1, 2], [2, 1, 0]):
        bench = Bench(3, 50, 50)
        for row, index in enumerate(order):
            bench.set(row, **settings[index])
        assert bench.launch(logits[order]) == [alone[index] for index in order]


def test_fault_b6_greedy_with_a_ban_beside_a_sampled_row():
    bench = Bench(2, 40, 40)
    logits = logits_of(2, 40)
    best = logits.argmax(dim=1).tolist()
    bench.set(0, banned=[best[0]], banned_until=100)
    bench.set(1, temperature=0.8, top_k=3)
    want = bench.want(logits)
    got = bench.launch(logits)
    assert got == want and got[0] not in (-1, best[0]) and got[1] >= 0


def test_equal_values_go_to_the_lowest_id():
    columns = CHUNK + 50
    logits = torch.zeros(3, columns, device=DEVICE)
    logits[1, [CHUNK + 3, 300, 17]] = 2.0
    bench = Bench(3, columns, columns)
    bench.set(2, temperature=1.0, top_k=columns)
    ids = bench.launch(logits)
    assert ids[:2] == [0, 17] and ids[2] >= 0


@pytest.mark.parametrize("vocabulary", [64, 400])
def test_both_zeros_are_kept_together(vocabulary):
    """Few are compared as they are, many by their ordered bits, which differ between the two."""
    settings = [{"top_p": 0.5}, {"top_k": vocabulary // 4}, {"top_k": vocabulary // 4, "top_p": 0.5}]
    bench = Bench(8 * len(settings), vocabulary, vocabulary)
    for row in range(bench.rows):
        bench.set(row, seed=row, temperature=1.0, **settings[row % len(settings)])
    logits = torch.zeros(bench.rows, vocabulary, device=DEVICE)
    logits[:, 1::2] = -0.0
    want = bench.want(logits)
    assert bench.launch(logits) == want


def test_rows_that_cannot_be_sampled_fail_alone():
    columns = CHUNK + 9
    logits = logits_of(6, columns)
    logits[0, CHUNK + 1] = float("nan")
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    logits[3, 5] = float("inf")
    bench = Bench(6, columns, columns)
    bench.set(1, temperature=1.0, top_p=0.9)
    ids = bench.launch(logits)
    assert ids[:4] == [-1, -1, -1, -1] and ids[4:] == logits[4:].argmax(dim=1).tolist()
    assert bench.slot_token_ids[int(bench.row_slots[0]), 10] == 0, "a failed row must leave an id that can be embedded"


def test_padding_rows_and_unfinished_chunks_change_nothing():
    bench = Bench(4, 40, 40)
    bench.row_slots[1], bench.sample_rows[2] = -1, -1
    logits = logits_of(4, 40)
    logits[1] = float("nan")
    assert bench.launch(logits)[1:3] == [-2, -2]
    assert bench.known.tolist() == [11, 10, 10, 11]


def test_the_token_feeds_the_next_step_and_the_counts():
    bench = Bench(2, 40, 40)
    slot = bench.set(0, frequency=1.5, prompt=[1, 2], output=[3])
    logits = torch.zeros(2, 40, device=DEVICE)
    logits[:, 3], logits[:, 5] = 4.0, 3.0
    produced = [bench.launch(logits)[0] for _ in range(4)]
    assert produced == [5, 3, 5, 3]  # 3 - 0; 2.5 - ...: each choice makes itself less likely
    assert bench.known[slot] == 14 and bench.slot_token_ids[slot, 10:14].tolist() == produced
    assert bench.state.counts[slot, [1, 2, 3, 5]].tolist() == [1, 1, 6, 4]


def test_logprobs_are_of_the_raw_logits():
    columns = CHUNK + 100
    logits = logits_of(3, columns, scale=5)
    logits[0, [7, 4000, CHUNK + 2]] = 40.0  # equal values
    bench = Bench(3, columns, columns)
    bench.set(0, logprobs=5)
    bench.set(1, logprobs=0, temperature=0.5, top_k=2)
    bench.set(2, logprobs=8, repetition=3.0, prompt=[int(logits[2].argmax())])
    ids = bench.launch(logits)
    want = logprobs_reference(logits)
    for row in range(3):
        assert bench.out.ranks[row] == 1 + int((want[row] > want[row, ids[row]]).sum())
        assert abs(float(bench.out.logprobs[row] - want[row, ids[row]])) < 1e-4
    for row, count in ((0, 5), (2, 8)):
        values, order = torch.sort(want[row], descending=True, stable=True)
        assert bench.out.top_ids[row, :count].tolist() == order[:count].tolist()
        assert torch.allclose(bench.out.top_logprobs[row, :count], values[:count], atol=1e-4)


def test_no_rows_is_no_work():
    bench = Bench(1, 40, 40)
    empty = torch.empty(0, dtype=torch.int32, device=DEVICE)
    before = bench.slot_token_ids.clone()
    sample(torch.empty(0, 40, device=DEVICE), empty, empty, bench.known, bench.slot_token_ids, bench.state,
           bench.workspace, SampledTokens.allocate(0, 2, DEVICE), 40)  # fmt: skip
    assert torch.equal(bench.slot_token_ids, before)


def test_plan():
    plan = launch_plan(1, 151_936)
    assert plan.scan_grid == (1, 38) and plan.choose_grid == (1, 38) and plan.piece_tile == 1024
    assert launch_plan(256, 151_936).choose_grid == (256, 1) and launch_plan(64, 151_936).choose_grid == (64, 2)
    assert launch_plan(256, 151_936).scan_grid == (256, 2) and launch_plan(1000, 151_936).scan_grid == (1000, 1)


def test_wrong_arguments_are_named():
    bench = Bench(2, 40, 40)
    with pytest.raises(ValueError, match="vocabulary: wanted 1 to 39 columns of logits"):
        bench.launch(torch.zeros(2, 39, device=DEVICE))
    with pytest.raises(ValueError, match=r"row_slots: wanted shape \[3\], got \[2\]"):
        bench.launch(torch.zeros(3, 40, device=DEVICE))


def chi_square(observed: torch.Tensor, probability: torch.Tensor) -> tuple[float, float]:
    """The statistic over ids with a positive probability, and its limit: mean + 5 standard deviations."""
    expected = probability * observed.sum()
    possible = expected > 0
    assert observed[~possible].sum() == 0, "an id that was cut off was chosen"
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = int(possible.sum()) - 1
    return float(statistic), freedom + 5 * (2 * max(freedom, 1)) ** 0.5


DISTRIBUTIONS = [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "bias": {1: 1.0}}]


@pytest.mark.parametrize("setting", DISTRIBUTIONS)
def test_reference_distribution(setting):
    """30,000 draws of the reference, whose tokens the kernel's equal, against exact probabilities."""
    bench = Bench(1, 12, 12)
    bench.set(0, temperature=0.9, seed=3, **setting)
    cpu = SamplingState(*(getattr(bench.state, item.name).cpu() for item in fields(bench.state)))
    logits = logits_of(1, 12, seed=8, scale=1.5)[0].cpu()
    probability = exact_probability(logits, cpu)
    draws = 30_000
    bits = noise_bits_reference(torch.tensor(3), torch.arange(draws)[:, None], torch.arange(12)[None, :])
    scores = probability.log() + gumbel_reference(bits)
    observed = torch.bincount(scores.argmax(dim=1), minlength=12).double()
    statistic, limit = chi_square(observed, probability)
    assert statistic < limit, f"chi-square {statistic:.1f}, limit {limit:.1f}"


def exact_probability(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    x = adjusted_reference(logits, 0, torch.zeros(10, dtype=torch.int32), state)
    return x.double().masked_fill(~kept_reference(x, 0, state), float("-inf")).softmax(0)


@pytest.mark.gpu
@pytest.mark.parametrize("setting", DISTRIBUTIONS)
def test_kernel_distribution(setting):
    """40,000 rows that differ only in their seeds, against exact probabilities."""
    rows, columns = 40_000, 12
    bench = Bench(rows, columns, columns, top_count=0)
    bench.set(0, temperature=0.9, **setting)
    first = int(bench.row_slots[0])
    for tensor in (bench.state.numbers, bench.state.choices, bench.state.bias_ids, bench.state.bias_values):
        tensor[:] = tensor[first].clone()
    bench.state.choices[:, SEED_LOW] = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    logits = logits_of(1, columns, seed=8, scale=1.5).expand(rows, columns).contiguous()
    ids = torch.tensor(bench.launch(logits))
    cpu = SamplingState(*(getattr(bench.state, item.name)[:1].cpu() for item in fields(bench.state)))
    observed = torch.bincount(ids, minlength=columns).double()
    statistic, limit = chi_square(observed, exact_probability(logits[0].cpu(), cpu))
    assert statistic < limit, f"chi-square {statistic:.1f}, limit {limit:.1f}"


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.01, 3.0, 12.0])
def test_production_vocabulary_equals_the_reference(scale):
    """Flat rows need the search over the whole row, peaked ones the gathered candidates."""
    vocabulary = 151_669
    bench = Bench(len(SETTINGS), 151_936, vocabulary)
    for row, setting in enumerate(SETTINGS):
        bench.set(row, seed=row + 1, **setting)
    logits = logits_of(len(SETTINGS), 151_936, seed=4, scale=scale)
    want = bench.want(logits)
    assert bench.launch(logits) == want
    assert bench.launch(logits.bfloat16()) is not None


@pytest.mark.gpu
def test_replay_goes_on_from_the_state():
    eager, captured = Bench(4, 5000, 5000), Bench(4, 5000, 5000)
    logits = logits_of(4, 5000)
    for bench in (eager, captured):
        for row, setting in enumerate(SETTINGS[1:5]):
            bench.set(row, seed=row, **setting)
    want = [eager.launch(logits) for _ in range(4)]
    got = [captured.launch(logits)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, captured.row_slots, captured.sample_rows, captured.known, captured.slot_token_ids,
               captured.state, captured.workspace, captured.out, 5000)  # fmt: skip
    for _ in range(3):
        graph.replay()
        got.append(captured.out.ids.tolist())
    assert got == want


def test_the_kernels_places_are_those_of_the_tensors():
    state, workspace = SamplingState.allocate(2, 100, "cpu"), SamplingWorkspace.allocate(2, 100, "cpu")
    found = state.arguments(torch.zeros(2, 8, dtype=torch.int32))
    places = {columns.NUMBERS: state.numbers, columns.CHOICES: state.choices, columns.COUNTS: state.counts}
    assert all(found[place.value] is tensor for place, tensor in places.items())
    assert found[columns.COUNTS_STRIDE.value] == state.counts.stride(0)
    names = ["PIECE_MAXIMA", "CHUNK_SUMS", "RAW_PIECE_MAXIMA", "RAW_CHUNK_SUMS"]
    names += ["CANDIDATE_VALUES", "CANDIDATE_IDS", "TICKETS", "BIN_MASSES", "INTERVAL_VALUES"]
    assert [getattr(columns, name).value for name in names] == list(range(len(workspace.tensors())))
    assert workspace.tensors() == tuple(getattr(workspace, field.name) for field in fields(workspace))
