"""The CPU sampler against plain formulas in float64, and the faults that samplers have had (FAULTS B)."""

import math
from array import array
from random import Random

import numpy as np
import pytest
import torch

from common.messages import NewSlots, SlotInit, SlotSampling, TokenLogprobs
from common.sampling_params import sample_seed
from kernels.noise import noise_bits_reference
from worker_proc.logit_rules import LogitRules
from worker_proc.logprobs import logprob_table, logprob_tensors
from worker_proc.noise import gumbel_from_bits, gumbel_noise, random_bits
from worker_proc.pending import sampled_entries
from worker_proc.sampler import Sampled, Sampler, choose
from worker_proc.slots import SlotMemory, SlotMirror

VOCAB = 64


class Bench:
    """A sampler with requests in its slots, fed with logits by the test."""

    def __init__(self, vocab: int = VOCAB, tokenizer_vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self.memory = SlotMemory(16, 64, 4, torch.device("cpu"))
        self.mirror = SlotMirror(16)
        self.sampler = Sampler(self.memory, self.mirror, tokenizer_vocab)

    def add(self, slot: int, tokens: list[int], sampling: SlotSampling, prompt_count: int = 0) -> int:
        init = SlotInit(
            slot=slot, token_ids=array("i", tokens), prompt_count=prompt_count or len(tokens), computed_count=0,
            block_ids=array("i"), sampling=sampling,
        )  # fmt: skip
        if self.mirror.sampling[slot] is not None:
            self.mirror.clear(slot)
        self.mirror.start(NewSlots.of(init))
        self.sampler.start(init)
        self.memory.token_ids[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.memory.known_lengths[slot] = len(tokens)
        return slot

    def sample(self, logits: np.ndarray, slots: list[int]):
        rows = np.array(slots, dtype=np.int32)
        sampled = self.sampler.sample(logits.copy(), rows, self.mirror.known_lengths[rows])
        self.mirror.known_lengths[rows] += 1
        return sampled

    def alone(self, logits: np.ndarray, tokens: list[int], sampling: SlotSampling, prompt_count: int = 0) -> int:
        slot = self.add(15, tokens, sampling, prompt_count)
        return int(self.sample(logits[None], [slot]).token_ids[0])


def entries_of(sampled: Sampled) -> tuple[TokenLogprobs, ...]:
    return sampled_entries(sampled.logprobs, sampled.logprob_rows)


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32)


def random_sampling(seed: int) -> SlotSampling:
    rng = Random(seed)
    return SlotSampling(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 1, 5, 1000]),
        top_p=rng.choice([1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.5, 0.7]),
        seed=rng.randrange(2**64),
        min_output_count=rng.choice([0, 6]),
        end_token_ids=(2, 3),
        bias_token_ids=array("i", rng.sample(range(VOCAB), 3)),
        bias_values=array("f", [2.0, -1.0, 0.5]),
        allowed_token_ids=array("i", rng.choice([[], [], list(range(0, VOCAB, 2))])),
        bad_token_ids=rng.choice([(), ((5,), (11, 12), (10, 11, 13))]),
    )


def adjusted(logits: np.ndarray, tokens: list[int], prompt_count: int, sampling: SlotSampling) -> np.ndarray:
    """The rules, one token id at a time, in float64."""
    x = logits.astype(np.float64)
    output = tokens[prompt_count:]
    banned = {word[-1] for word in sampling.bad_token_ids if tuple(tokens[len(tokens) - len(word) + 1 :]) == word[:-1]}
    if len(output) < sampling.min_output_count:
        banned |= set(sampling.end_token_ids)
    if sampling.allowed_token_ids:
        banned |= set(range(len(x))) - set(sampling.allowed_token_ids)
    for token in banned:
        x[token] = -math.inf
    for token, bias in zip(sampling.bias_token_ids, sampling.bias_values, strict=True):
        x[token] += bias
    for token in set(tokens):
        x[token] = x[token] / sampling.repetition_penalty if x[token] > 0 else x[token] * sampling.repetition_penalty
    for token in set(output):
        x[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    return x


def expected_token(x: np.ndarray, sampling: SlotSampling, position: int) -> int:
    """The choice from adjusted logits, by sorting, in float64."""
    if sampling.temperature == 0:
        return int(x.argmax())
    x = x / sampling.temperature
    kept = x >= x.max() + (math.log(sampling.min_p) if sampling.min_p else -math.inf)
    if 0 < sampling.top_k < len(x):
        kept &= x >= np.sort(x)[-sampling.top_k]
    order = [token for token in np.argsort(-x, kind="stable") if kept[token]]
    mass = np.exp(x[order] - x.max())
    count = int(np.searchsorted(np.cumsum(mass), sampling.top_p * mass.sum())) + 1 if sampling.top_p < 1 else len(order)
    noise = gumbel_noise(sampling.seed, position, np.arange(len(x), dtype=np.uint32))
    return max(order[:count], key=lambda token: x[token] + noise[token])


@pytest.mark.parametrize("seed", range(60))
def test_choices_equal_plain_formulas_in_float64(seed):
    rng = Random(seed)
    tokens = [rng.randrange(VOCAB) for _ in range(9)] + [10, 11]
    logits, sampling = random_logits(seed)[0], random_sampling(seed)
    expected = expected_token(adjusted(logits, tokens, 7, sampling), sampling, len(tokens))
    assert Bench().alone(logits, tokens, sampling, 7) == expected, sampling


@pytest.mark.parametrize("seed", range(60))
def test_rules_equal_plain_formulas_in_float64_on_every_id(seed):
    """Also where it does not change the choice: negative logits, ids that stand in the output more than once."""
    rng = Random(seed)
    tokens = [rng.randrange(VOCAB) for _ in range(7)] + [rng.choice([10, 11, 5, 20]) for _ in range(9)]
    logits, sampling = random_logits(seed)[0], random_sampling(seed)
    found = logits.copy()
    rules = LogitRules.of(sampling)
    assert rules is not None
    rules.apply(found, np.array(tokens, dtype=np.int32), 7)
    np.testing.assert_allclose(
        found, adjusted(logits, tokens, 7, sampling), rtol=1e-5, atol=1e-5, err_msg=str(sampling)
    )


def test_every_row_gets_the_token_that_it_gets_alone():
    """Whatever stands beside it, in whatever order (B1, B6): bit for bit the same choice."""
    rows = 14
    logits, samplings = random_logits(1, rows), [random_sampling(100 + row) for row in range(rows)]
    tokens = [list(range(row, row + 3 + row)) for row in range(rows)]
    alone = [Bench().alone(logits[row], tokens[row], samplings[row], 2) for row in range(rows)]
    for shuffle_seed in range(5):
        order = list(range(rows))
        Random(shuffle_seed).shuffle(order)
        bench = Bench()
        slots = [bench.add(row, tokens[row], samplings[row], 2) for row in order]
        assert bench.sample(logits[order], slots).token_ids.tolist() == [alone[row] for row in order]


@pytest.mark.parametrize(
    "values",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"bias_token_ids": array("i", [1]), "bias_values": array("f", [2.0])},
        {"allowed_token_ids": array("i", [1])},
        {"bad_token_ids": ((1,),)},
        {"min_output_count": 9, "end_token_ids": (1,)},
    ],
    ids=lambda values: next(iter(values)),
)
def test_each_parameter_alone_changes_the_logits(values):
    assert LogitRules.of(SlotSampling(temperature=0.5, top_k=3, end_token_ids=(2,))) is None
    rules = LogitRules.of(SlotSampling(**values))
    logits = random_logits(9, 1)[0]
    changed = logits.copy()
    rules.apply(changed, np.array([5, 7, 7], dtype=np.int32), prompt_count=1)
    assert not np.array_equal(changed, logits)


def test_repetition_penalty_beside_top_k_1_in_both_orders():
    """B1."""
    logits = random_logits(3, 2)
    penalised = SlotSampling(temperature=0.0, repetition_penalty=2.0)
    single = SlotSampling(temperature=1.0, top_k=1, seed=99)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    solo = [Bench().alone(logits[0], prompts[0], penalised), Bench().alone(logits[1], prompts[1], single)]
    assert solo[1] == logits[1].argmax()
    for order in ([0, 1], [1, 0]):
        bench = Bench()
        slots = [bench.add(row, prompts[row], (penalised, single)[row]) for row in order]
        assert bench.sample(logits[order], slots).token_ids.tolist() == [solo[row] for row in order]


def test_greedy_row_with_a_banned_token_beside_a_sampled_one():
    """B6: no division of a masked logit makes a NaN."""
    logits = random_logits(4, 2)
    best = int(logits[0].argmax())
    bench = Bench()
    bench.add(0, [1], SlotSampling(temperature=0.0, bad_token_ids=((best,),)))
    bench.add(1, [1], SlotSampling(temperature=0.8, seed=1))
    chosen = bench.sample(logits, [0, 1]).token_ids.tolist()
    assert chosen[0] == int(np.argsort(-logits[0])[1])
    assert 0 <= chosen[1] < VOCAB


def test_samples_of_one_request_differ_and_come_again():
    """B8: sample seeds derived from one seed."""

    def draw() -> list[list[int]]:
        bench = Bench()
        for index in range(4):
            bench.add(index, [1, 2], SlotSampling(temperature=1.0, seed=sample_seed(1, index)))
        steps = [bench.sample(np.zeros((4, VOCAB), np.float32), [0, 1, 2, 3]).token_ids.tolist() for _ in range(6)]
        return [list(tokens) for tokens in zip(*steps, strict=True)]

    first = draw()
    assert len({tuple(tokens) for tokens in first}) == 4
    assert draw() == first


def test_noise_is_finite_at_both_ends_and_valid_on_a_large_vocabulary():
    """B12."""
    ends = gumbel_from_bits(np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], dtype=np.uint32))
    assert np.isfinite(ends).all()
    assert (np.diff(ends) <= 0).all()
    assert -2.9 < ends[-1] < ends[0] < 23
    logits = random_logits(5, vocab=131_072)[0]
    for seed in range(5):
        assert 0 <= choose(logits, SlotSampling(temperature=1.0, top_p=0.99, seed=seed), 7) < 131_072


def test_noise_bits_equal_the_kernels():
    ids = np.arange(300, dtype=np.uint32)
    for seed, position in ((0, 0), (2**64 - 1, 5), (0x0123456789ABCDEF, 40_000)):
        signed = np.array([seed], np.uint64).view(np.int64)
        reference = noise_bits_reference(torch.from_numpy(signed), torch.tensor(position), torch.arange(300))
        assert random_bits(seed, position, ids).tolist() == reference.tolist()


@pytest.mark.parametrize("sampling", [
    SlotSampling(temperature=1.0, seed=11),
    SlotSampling(temperature=0.7, seed=12),
    SlotSampling(temperature=1.0, top_p=0.8, seed=13),
])  # fmt: skip
def test_draws_follow_the_distribution(sampling):
    """Chi-square over 8,000 positions of one seed; the bound is the 1 - 1e-6 quantile for the degrees of freedom."""
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0], dtype=np.float32)
    draws = [choose(logits, sampling, position) for position in range(8000)]
    probabilities = np.exp(logits.astype(np.float64) / sampling.temperature)
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        last = int(np.searchsorted(np.cumsum(probabilities), sampling.top_p))
        probabilities[last + 1 :] = 0
        probabilities /= probabilities.sum()
    observed = np.bincount(draws, minlength=8)
    possible = probabilities > 0
    assert observed[~possible].sum() == 0
    expected = probabilities[possible] * len(draws)
    chi_square = float(((observed[possible] - expected) ** 2 / expected).sum())
    bounds = {8: 40.52, 4: 30.66, 5: 33.38}
    assert chi_square < bounds[int(possible.sum())], observed


def test_end_ids_wait_for_min_tokens_whatever_their_bias():
    """B3, at the sampler: exactly four tokens that end nothing, then the end."""
    sampling = SlotSampling(
        temperature=0.0, end_token_ids=(2, 30), min_output_count=4,
        bias_token_ids=array("i", [2, 30]), bias_values=array("f", [100.0, 100.0]),
    )  # fmt: skip
    bench = Bench()
    bench.add(0, [1], sampling)
    tokens = [int(bench.sample(random_logits(step), [0]).token_ids[0]) for step in range(5)]
    assert not {2, 30} & set(tokens[:4])
    assert tokens[4] in {2, 30}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_numbers_reports_minus_1_and_leaves_the_others(bad):
    logits = random_logits(6, 3)
    logits[1, 17] = bad
    bench = Bench()
    bench.add(0, [1], SlotSampling(temperature=0.0))
    bench.add(1, [1], SlotSampling(temperature=0.9, allowed_token_ids=array("i", [1, 2]), logprobs=2))
    bench.add(2, [1], SlotSampling(temperature=0.9, seed=3))
    sampled = bench.sample(logits, [0, 1, 2])
    assert sampled.token_ids[1] == -1
    assert sampled.token_ids[0] == logits[0].argmax()
    assert sampled.token_ids[2] == Bench().alone(logits[2], [1], SlotSampling(temperature=0.9, seed=3))
    assert bench.memory.token_ids[1, 1] == 0  # a token that the next step can compute
    assert all(
        math.isfinite(number) for number in [entries_of(sampled)[0].logprob, *entries_of(sampled)[0].top_logprobs]
    )


def test_nothing_left_to_sample_reports_minus_1():
    sampling = SlotSampling(
        temperature=0.0, allowed_token_ids=array("i", [4]), end_token_ids=(4,), min_output_count=1
    )  # fmt: skip
    assert Bench().alone(random_logits(7)[0], [1], sampling) == -1


def test_ids_that_the_tokenizer_lacks_are_never_sampled():
    bench = Bench(tokenizer_vocab=50)
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 50:] = 30.0
    bench.add(0, [60], SlotSampling(temperature=0.0, repetition_penalty=1.2, logprobs=20))
    bench.add(1, [60], SlotSampling(temperature=1.5, seed=1))
    for _ in range(30):
        sampled = bench.sample(logits, [0, 1])
        assert sampled.token_ids.max() < 50
        assert max(entries_of(sampled)[0].top_token_ids) < 50


def test_ties_go_to_the_lowest_id():
    logits = np.full(VOCAB, 1.0, np.float32)
    logits[[9, 40]] = 2.0
    assert Bench().alone(logits, [1], SlotSampling(temperature=0.0)) == 9


def test_a_token_has_the_same_log_probability_as_the_sampled_one_and_among_the_likeliest():
    logits = np.random.default_rng(3).normal(0, 5, (64, 1000)).astype(np.float32)
    table = logprob_table(logits, logits.argmax(-1).astype(np.int32), 2)
    assert table.top_logprobs[:, 0].tolist() == table.logprobs.tolist()


def test_equal_logits_are_reported_by_id():
    """On a GPU with --deterministic as on a CPU, however many rows there are."""
    logits = np.random.default_rng(4).integers(-3, 3, (5, 3000)).astype(np.float32)
    logits[0, ::2], logits[1, 5:] = -np.inf, -0.0
    chosen = logits.argmax(-1).astype(np.int32)
    table = logprob_table(logits, chosen, 20)
    columns = logprob_tensors(torch.from_numpy(logits), torch.from_numpy(chosen), 20, row_by_row=True)
    for found, wanted in zip(columns, (table.logprobs, table.ranks, table.top_ids, table.top_logprobs), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_logprobs_are_of_the_raw_distribution_and_finite():
    """B7: with everything but one token filtered away, all reported numbers are still finite."""
    logits = random_logits(8)
    logits[0, :4] = -np.inf
    bench = Bench()
    bench.add(0, [1, 5], SlotSampling(temperature=1.0, top_k=1, logprobs=5, repetition_penalty=1.3, seed=1))
    sampled = bench.sample(logits, [0])
    entry, token = entries_of(sampled)[0], int(sampled.token_ids[0])
    expected = torch.tensor(logits[0], dtype=torch.float64).log_softmax(-1)
    assert entry.rank == 1 + int((expected > expected[token]).sum())
    assert list(entry.top_token_ids) == expected.topk(5).indices.tolist()
    np.testing.assert_allclose([entry.logprob, *entry.top_logprobs], [expected[token], *expected.topk(5).values], 1e-6)
    assert entry.row_index == 0


def test_end_ids_and_bad_words_that_the_model_lacks_are_left_alone():
    """One legal request with an added token in `bad_words`, or a folder's stray end id, cost the whole engine."""
    sampling = SlotSampling(
        temperature=0.0, end_token_ids=(VOCAB + 5, 7), min_output_count=3, bad_token_ids=((VOCAB,), (3, VOCAB), (9,))
    )
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[7, 9, 11]] = 5.0, 4.0, 3.0
    assert Bench().alone(logits, [3], sampling) == 11
