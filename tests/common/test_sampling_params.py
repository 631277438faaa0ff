"""SamplingParams takes what can be served and refuses the rest by name."""

import math

import pytest

from common.errors import RequestError
from common.sampling_params import KNOWN_LIMIT, SamplingParams, _known, sample_seed
from common.wire import FieldReader, pack, unpack

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e400, "1", None, True, -3.0, [1.0]])
def test_numbers_that_are_none_are_refused(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.status == 400


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.5, "1", True, 2**64, -(2**64), math.nan])
def test_integers_that_are_none_are_refused(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-45),
        ("n", 0),
        ("n", 10**6),
        ("logprobs", 10**6),
        ("stop", ["a"] * 10**5),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", "x" * 10**6),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**63]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", 5),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"1_0": 1.0}),
        ("logit_bias", {" 5 ": 1.0}),
        ("logit_bias", {"\u0663": 1.0}),
        ("logit_bias", {"5\n": 1.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", 7),
        ("logit_bias", {index: 0.0 for index in range(10**5)}),
        ("allowed_token_ids", []),
        ("ignore_eos", 1),
        ("detokenize", "no"),
    ],
)
def test_values_out_of_range_are_refused(name, value):
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_ids_beyond_the_vocabulary_are_refused_by_field():
    for name, value in (("stop_token_ids", [100]), ("logit_bias", {100: 1.0}), ("allowed_token_ids", [100])):
        params = SamplingParams(**{name: value})
        params.check_for_model(101)
        with pytest.raises(RequestError, match="ids are 0 to 99"):
            params.check_for_model(100)


def test_min_tokens_above_max_tokens_names_both():
    with pytest.raises(RequestError, match=r"min_tokens is 5, more than max_tokens, which is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_every_field_survives_the_wire():
    params = SamplingParams(
        n=2,
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=-1,
        frequency_penalty=1,
        repetition_penalty=1.5,
        seed=-5,
        max_tokens=None,
        min_tokens=3,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=2,
        logit_bias={"7": -100},
        bad_words=["no"],
        allowed_token_ids=[1, 2],
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        detokenize=False,
    )
    _, fields = unpack(pack([1, params.to_wire()]))
    assert SamplingParams.from_wire(FieldReader("x", fields).mapping("params")) == params


def test_an_unknown_name_on_the_wire_is_refused():
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature'"):
        SamplingParams.from_wire({"temprature": 1.0})


def test_samples_of_one_request_have_different_reproducible_seeds():
    seeds = [sample_seed(1, index) for index in range(128)]
    assert len(set(seeds)) == 128
    assert seeds == [sample_seed(1, index) for index in range(128)]
    assert all(0 <= seed < 2**64 for seed in [*seeds, sample_seed(-1, 0), sample_seed(2**63 - 1, 127)])


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.6, "max_tokens": 3, "seed": 5},
        {"temperature": 1, "seed": None},
        {"n": 2, "logprobs": None, "ignore_eos": True},
        {"temperature": 0.6, "stop": ["a"], "seed": 5},
        {},
    ],
    ids=repr,
)
def test_what_is_remembered_is_what_would_be_built(values):
    _known.clear()
    first, again = SamplingParams.from_wire(values), SamplingParams.from_wire(dict(values))
    assert first == again == SamplingParams(**values)
    assert SamplingParams.from_wire({**values, "seed": 6}) == SamplingParams(**{**values, "seed": 6})
    without = {name: value for name, value in values.items() if name != "seed"}
    assert SamplingParams.from_wire(without) == SamplingParams(**without), "another request's seed is not its own"


@pytest.mark.parametrize("other", [True, 1.0])
def test_numbers_that_compare_equal_are_not_taken_for_one_another(other):
    assert SamplingParams.from_wire({"n": 1, "top_k": 1}).n == 1
    with pytest.raises(RequestError, match="^n: wanted an integer"):
        SamplingParams.from_wire({"n": other, "top_k": 1})


@pytest.mark.parametrize("seed", [True, 1.5, "1", 2**63, -(2**64), [1]])
def test_the_seed_of_remembered_parameters_is_checked(seed):
    SamplingParams.from_wire({"top_k": 2, "seed": 1})
    with pytest.raises(RequestError, match="^seed: wanted"):
        SamplingParams.from_wire({"top_k": 2, "seed": seed})


def test_many_different_parameters_are_forgotten_again():
    for top_k in range(3 * KNOWN_LIMIT):
        assert SamplingParams.from_wire({"top_k": top_k}).top_k == top_k
    assert len(_known) <= KNOWN_LIMIT


@pytest.mark.parametrize("values", [{"temperature": 0.5}, {"temperature": 0.5, "stop": ["x"], "logit_bias": {3: 1.0}}])
def test_what_is_remembered_of_the_wire_follows_every_change(values):
    """Requests that differ in the seed alone are written once; one with another limit is another."""
    params = SamplingParams.from_wire({**values, "max_tokens": 50, "min_tokens": 2})
    written = params.to_wire()
    written["temperature"] = 2.0
    for changes in (
        {"seed": 1},
        {"seed": 2},
        {"max_tokens": 7, "min_tokens": 1},
        {"max_tokens": 7, "seed": 3},
        {"seed": None},
    ):
        changed = params.with_values(**changes)
        changed.to_wire()
        assert SamplingParams.from_wire(changed.with_values(seed=9).to_wire()) == changed.with_values(seed=9)
        assert SamplingParams.from_wire(changed.to_wire()) == changed
