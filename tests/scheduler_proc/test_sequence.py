"""What the worker is told of a request: every field, since the simulator takes its own expectations from here."""

from array import array
from dataclasses import replace

import pytest

from common.messages import AddRequest, SlotSampling
from common.sampling_params import SamplingParams, sample_seed
from scheduler_proc.prefix_cache import Chain
from scheduler_proc.sequence import TEMPERATURE_FLOOR, Request, Sequence, _sampling, shared_sampling, slot_seed


def sampling_of(params, sample_index=0, **changes):
    message = AddRequest(request_id=7, prompt_token_ids=array("i", [1, 2, 3]), params=params)
    sequence = Sequence(Request(replace(message, **changes)), sample_index, 50, Chain(-1))
    return shared_sampling(sequence).with_seed(slot_seed(sequence))


def test_every_parameter_reaches_the_worker():
    params = SamplingParams(
        temperature=0.7, top_k=11, top_p=0.9, min_p=0.05, presence_penalty=0.1, frequency_penalty=0.2,
        repetition_penalty=1.3, seed=42, min_tokens=5, logprobs=3, prompt_logprobs=2, logit_bias={4: 1.5, 9: -2.0},
        allowed_token_ids=(4, 9),
    )  # fmt: skip
    found = sampling_of(params, end_token_ids=(2, 30), bad_token_ids=((7,), (20, 21)))
    assert found == SlotSampling(
        temperature=0.7, top_k=11, top_p=0.9, min_p=0.05, presence_penalty=0.1, frequency_penalty=0.2,
        repetition_penalty=1.3, seed=sample_seed(42, 0), min_output_count=5, logprobs=3, prompt_logprobs=2,
        end_token_ids=(2, 30), bias_token_ids=array("i", [4, 9]), bias_values=array("f", [1.5, -2.0]),
        allowed_token_ids=array("i", [4, 9]), bad_token_ids=((7,), (20, 21)), masked=False,
    )  # fmt: skip


def test_logprobs_that_nobody_wants_are_not_those_of_no_token():
    assert (sampling_of(SamplingParams()).logprobs, sampling_of(SamplingParams()).prompt_logprobs) == (-1, -1)
    found = sampling_of(SamplingParams(logprobs=0, prompt_logprobs=0))
    assert (found.logprobs, found.prompt_logprobs) == (0, 0)
    assert sampling_of(SamplingParams(prompt_logprobs=4), sample_index=1).prompt_logprobs == -1


def test_only_what_names_few_ids_is_remembered():
    """256 requests with long bad words, which would have been kept, name hundreds of megabytes of ids."""
    words = tuple((word, *range(1000)) for word in range(64))
    _sampling.cache_clear()
    assert sampling_of(SamplingParams(), bad_token_ids=words).bad_token_ids == words
    assert _sampling.cache_info().currsize == 0
    sampling_of(SamplingParams(), bad_token_ids=words[0:0], end_token_ids=(2, 3))
    assert _sampling.cache_info().currsize == 1


LONG_WORDS = tuple((word, *range(99)) for word in range(9))


@pytest.mark.parametrize(
    ("params", "words"),
    [({"logit_bias": {4: 1.5}}, ()), ({"allowed_token_ids": (4, 9)}, ()), ({}, LONG_WORDS), ({}, ())],
)  # fmt: skip
def test_the_samples_of_a_request_share_how_they_are_sampled(params, words):
    """A bias, or many ids, went to the worker once for each of them."""
    given = SamplingParams(n=3, prompt_logprobs=2, **params)
    request = Request(
        AddRequest(request_id=7, prompt_token_ids=array("i", [1, 2, 3]), params=given, bad_token_ids=words)
    )
    first, *others = (shared_sampling(Sequence(request, index, 50, Chain(-1))) for index in range(3))
    assert others[0] is others[1] and others[0] == replace(first, prompt_logprobs=-1)
    assert list(first.bias_token_ids) == list(given.logit_bias) and first.bad_token_ids == words


@pytest.mark.parametrize("seed", [None, 42])
def test_each_sample_has_its_seed(seed):
    params = SamplingParams(seed=seed)
    seeds = [sampling_of(params, index).seed for index in range(3)]
    assert seeds == [sample_seed(7 if seed is None else seed, index) for index in range(3)]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize("temperature", [0.0, 1e-30, TEMPERATURE_FLOOR / 2])
def test_greedy_has_no_temperature(temperature):
    """The worker asks for 0 alone; it divides logits by anything else."""
    assert sampling_of(SamplingParams(temperature=temperature)).temperature == 0.0
    assert sampling_of(SamplingParams(temperature=TEMPERATURE_FLOOR)).temperature == TEMPERATURE_FLOOR
