"""Scheduler and worker are lost at any moment and start anew: every request goes on as if nothing had happened."""

import pytest
import torch

from common.sampling_params import SamplingParams
from tests.support import tiny
from tests.support.memory_engine import MemoryEngine
from worker_proc.loader import load_model

OUTPUT_COUNT = 14
PARAMS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.9, "seed": 5, "top_p": 0.9},
    "three samples": {"temperature": 1.0, "seed": 6, "n": 3, "logit_bias": {7: 3.5}},
    "penalties": {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "min_tokens": {"temperature": 0.0, "min_tokens": 9, "logit_bias": {7: 100.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "regex": {"temperature": 0.7, "seed": 8, "structured_outputs": {"regex": "(yes|no)( maybe)* (a|b)"}},
    "bad words": {"temperature": 0.0, "max_tokens": 3},
}
END_ID = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("tiny") / "m")


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


def start(model, folder, **limits) -> MemoryEngine:
    """An engine with one request of each kind."""
    engine = MemoryEngine(model, folder / "tokenizer.json", **limits)
    for number, params in enumerate(PARAMS.values()):
        prompt = [(11 * number + 7 * place) % model.config.vocab_size for place in range(3 + 5 * number)]
        engine.add(prompt, SamplingParams(**{"max_tokens": OUTPUT_COUNT, **params}), (END_ID,))
    return engine


def outcome(engine: MemoryEngine) -> tuple[list, list[float]]:
    """What every sample got: exact things, and log probabilities."""
    assert engine.failures == {}
    found = [(list(PARAMS)[number], index, sample) for (number, index), sample in sorted(engine.samples.items())]
    exact = [(name, index, sample.token_ids, sample.finish) for name, index, sample in found]
    logprobs = [value for _, _, sample in found for entry in sample.logprobs for value in entry]
    return exact, logprobs + [value for _, _, sample in found for value in sample.prompt_logprobs]


def assert_same(engine: MemoryEngine, wanted: tuple[list, list[float]], what: str) -> None:
    exact, logprobs = outcome(engine)
    assert exact == wanted[0], what
    assert logprobs == pytest.approx(wanted[1], abs=1e-4), what


@pytest.fixture(scope="module")
def undisturbed(model, folder):
    engine = start(model, folder)
    engine.run()
    return outcome(engine)


def test_the_cases_say_something(undisturbed):
    """Ends of several kinds, and samples of one request that end at different steps."""
    exact, logprobs = undisturbed
    assert {finish for _, _, _, finish in exact} == {"stop", "length"}
    assert len({len(tokens) for name, _, tokens, _ in exact if name == "three samples"}) > 1
    assert len(logprobs) > OUTPUT_COUNT


@pytest.mark.parametrize("steps", range(0, 20, 3))
@pytest.mark.parametrize("limits", [{}, {"run_ahead": 0, "max_num_batched_tokens": 16}], ids=["plain", "chunked"])
def test_a_restart_changes_no_token(model, folder, undisturbed, steps, limits):
    engine = start(model, folder, **limits)
    for _ in range(steps):
        engine.step()
    engine.restart()
    engine.run()
    assert_same(engine, undisturbed, f"restarted after {steps} steps with {limits}")


def test_restarts_again_and_again(model, folder, undisturbed):
    engine = start(model, folder)
    for _ in range(40):
        for _ in range(4):  # the pipeline fills, then at least one token comes
            engine.step()
        engine.restart()
    engine.run()
    assert_same(engine, undisturbed, "restarted every 4 steps")


def test_what_goes_on_is_not_refused_by_a_full_queue(model, folder):
    engine = start(model, folder, max_queued=len(PARAMS))
    engine.restart()
    engine.run()
    assert engine.failures == {}


def test_what_does_not_fit_any_more_is_refused_with_the_numbers(model):
    engine = MemoryEngine(model)
    engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=40, temperature=0.0))
    for _ in range(12):
        engine.step()
    known = 5 + len(engine.samples[0, 0].token_ids)
    engine.limits = engine.limits.__class__(max_model_len=known, max_num_seqs=4, max_num_batched_tokens=16,
                                            block_size=4, block_count=30)  # fmt: skip
    engine.restart()
    assert engine.failures[0].error_code == "context_length_exceeded"
    assert f"prompt and output have {known} tokens; the engine was started again" in engine.failures[0].message
