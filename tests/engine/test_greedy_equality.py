"""Greedy float32 tokens equal transformers', whatever the batch, the cache, the chunks, the pressure and the run-ahead.

The real scheduler core and the real runner, in one process (check 3 of the fault list; C2, C3, C8, F12).
"""

import json
from random import Random

import pytest
import torch

from tests.support import oracle, tiny
from tests.support.memory_engine import MemoryEngine
from worker_proc.loader import load_model

OUTPUT_COUNT = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": 300,
}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "longrope": LONGROPE,
    "llama3": LLAMA3,
}
MODELS = {
    "llama-gqa-tied": ("Llama", {}),
    "llama-mha-untied": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": False}),
    "llama-head-dim": ("Llama", {"head_dim": 24}),
    "qwen3-gqa-untied": ("Qwen3", {"tie_word_embeddings": False}),
    "qwen3-mha-head-dim": ("Qwen3", {"num_key_value_heads": 6, "head_dim": 32}),
    "qwen2": ("Qwen2", {"head_dim": 8}),
    "mistral-window": ("Mistral", {"sliding_window": 24}),
} | {
    f"{family.lower()}-{name}": (family, {"rope_parameters": {"rope_theta": 10000.0, **rope}})
    for family in ("Llama", "Qwen3")
    for name, rope in ROPES.items()
}

CONDITIONS = {
    "alone": {"max_num_seqs": 1},
    "batch": {},
    "run-ahead-0": {"run_ahead": 0},
    "run-ahead-1": {"run_ahead": 1},
    "chunk-1": {"max_num_batched_tokens": 1},
    "chunk-block-1": {"max_num_batched_tokens": 3},
    "chunk-block": {"max_num_batched_tokens": 4},
    "chunk-block+1": {"max_num_batched_tokens": 5},
    "pressure": {"block_count": 60},
    "pressure-run-ahead-0": {"block_count": 60, "run_ahead": 0},
    "no-prefix-cache": {"prefix_cache": "off"},
}


def random_prompts(vocab_size, count=20, seed=0):
    rng = Random(seed)
    lengths = [1, 3, 4, 5, 8, *(rng.randint(2, 70) for _ in range(count - 5))]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


class Case:
    """A model of ours and of transformers', prompts, and the right answers."""

    def __init__(self, folder, prompts):
        self.oracle = oracle.load_oracle(folder)
        self.model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
        self.prompts = prompts or random_prompts(self.model.config.vocab_size)
        self.wanted = [oracle.greedy(self.oracle, prompt, OUTPUT_COUNT) for prompt in self.prompts]


@pytest.fixture(scope="module")
def tiny_case(tmp_path_factory):
    """The plainest tiny model, for every condition."""
    return Case(tiny.save_model(tmp_path_factory.mktemp("tiny") / "m"), None)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_every_condition_gives_the_tokens_of_transformers(tiny_case, condition):
    engine = MemoryEngine(tiny_case.model, **CONDITIONS[condition])
    assert engine.generate(tiny_case.prompts, OUTPUT_COUNT) == tiny_case.wanted
    if condition.startswith("pressure"):
        assert engine.core.stats().preemptions > 0


def test_a_warm_prefix_cache_gives_the_same_tokens_and_recomputes_little(tiny_case):
    engine = MemoryEngine(tiny_case.model, block_count=800)
    assert engine.generate(tiny_case.prompts, OUTPUT_COUNT) == tiny_case.wanted
    hits_before = engine.core.stats().prefix_hit_tokens
    assert engine.generate(tiny_case.prompts, OUTPUT_COUNT) == tiny_case.wanted
    for request_id, prompt in enumerate(tiny_case.prompts, len(tiny_case.prompts)):
        cached = engine.samples[request_id, 0].cached_count
        assert len(prompt) - 4 <= cached <= len(prompt) - 1, f"{len(prompt)} tokens, {cached} from the cache"
    assert engine.core.stats().prefix_hit_tokens > hits_before


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_the_tokens_of_transformers(tmp_path, name):
    family, overrides = MODELS[name]
    case = Case(tiny.save_model(tmp_path / "m", family, **overrides), None)
    assert MemoryEngine(case.model).generate(case.prompts, OUTPUT_COUNT) == case.wanted
    tight = MemoryEngine(case.model, block_count=60, max_num_batched_tokens=17, run_ahead=1)
    assert tight.generate(case.prompts, OUTPUT_COUNT) == case.wanted


QUESTIONS = [
    "Why is the sky blue?",
    "Name three rivers in France.",
    "Write a haiku about the sea.",
    "What is 17 times 23?",
    "Explain photosynthesis in one sentence.",
    "Who wrote Don Quixote?",
    "Translate 'good morning' into German.",
    "List the planets of the solar system.",
    "What does a compiler do?",
    "Tell me a short story about a fox.",
    "How do I boil an egg?",
    "What is the capital of Mongolia?",
    "Give me a synonym for 'quick'.",
    "Why do leaves change colour in autumn?",
    "What is a prime number?",
    "Describe the taste of a lemon.",
    "How far away is the Moon?",
    "What is the speed of light?",
    "Write one line of Python that prints the date.",
    "What is the difference between a list and a tuple?",
]


@pytest.fixture(scope="module")
def default_case(default_model_dir):
    """The default model with twenty questions; the oracle judges by one forward pass each."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))
    prompts = [tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n").ids for q in QUESTIONS]
    assert len(json.loads((default_model_dir / "config.json").read_text())["architectures"]) == 1
    return (
        oracle.load_oracle(default_model_dir),
        load_model(default_model_dir, device=torch.device("cpu"), dtype=torch.float32),
        prompts,
    )


@pytest.fixture(scope="module")
def default_answers(default_case):
    """What the engine says to each question in a batch of 16, checked against the oracle."""
    judge, model, prompts = default_case
    answers = MemoryEngine(model).generate(prompts, OUTPUT_COUNT)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == OUTPUT_COUNT
        oracle.assert_greedy(judge, prompt, answer)
    return answers


@pytest.mark.timeout(300)
@pytest.mark.parametrize("condition", ["pressure", "chunk-block+1", "run-ahead-0"])
def test_the_default_model_gives_the_same_tokens_under_other_conditions(default_case, default_answers, condition):
    _, model, prompts = default_case
    limits = {"pressure": {"block_count": 40}}.get(condition, CONDITIONS[condition])
    engine = MemoryEngine(model, **limits)
    assert engine.generate(prompts[:8], 24) == [answer[:24] for answer in default_answers[:8]]
    if condition == "pressure":
        assert engine.core.stats().preemptions > 0
        assert engine.generate(prompts[:4], 24) == [answer[:24] for answer in default_answers[:4]], "a warm cache"


@pytest.fixture(scope="module")
def default_generated(default_case):
    """What transformers' own generate says to each question."""
    judge, _, prompts = default_case
    return [oracle.greedy(judge, prompt, OUTPUT_COUNT) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("condition", CONDITIONS)
def test_the_default_model_equals_transformers_generate_under_every_condition(
    default_case, default_generated, condition
):
    _, model, prompts = default_case
    limits = {**CONDITIONS[condition], **({"block_count": 100} if "pressure" in condition else {})}
    engine = MemoryEngine(model, **limits)
    assert engine.generate(prompts, OUTPUT_COUNT) == default_generated
    if "pressure" not in condition:
        assert engine.generate(prompts[:2], OUTPUT_COUNT) == default_generated[:2], "with a warm prefix cache"
