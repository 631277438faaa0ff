"""Our models give transformers' logits, whatever the chunking, batching and block placement."""

from copy import deepcopy
from random import Random

import pytest
import torch

from tests.support.paged import PagedSequences
from worker_proc.attention import attention_reference
from worker_proc.loader import load_model

CPU = torch.device("cpu")
VARIANTS = {
    "llama_gqa": ("Llama", {}),
    "llama_mha_tied": ("Llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_mha_tied": ("Qwen3", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
}
ROPE_VARIANTS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0,
        "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "longrope": {
        "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)],
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}  # fmt: skip


def token_ids(count: int, seed: int = 0) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, 131) for _ in range(count)]


def reference_logits(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def assert_as_exact(ours: torch.Tensor, reference, ids: list[int]) -> None:
    """The last logits of `ids` err at most twice as much as transformers' in float32, both against float64: how much
    float32 rounds away depends on the model and on the processor. Two millionths of their scale are always allowed."""
    exact, theirs = (
        reference_logits(model, ids)[-len(ours) :] for model in (deepcopy(reference).double(), reference)
    )  # fmt: skip
    scale = exact.abs().max()
    error, allowed = (((logits - exact).abs().max() / scale).item() for logits in (ours, theirs))
    assert error <= 2 * max(allowed, 1e-6), f"relative error {error:.2e}, of transformers {allowed:.2e}"


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_for_every_chunking(name, tiny_model):
    family, overrides = VARIANTS[name]
    reference, folder = tiny_model(family, **overrides)
    model = load_model(folder, device=CPU, dtype=torch.float32)
    ids = token_ids(21)
    for chunk in (1, 3, 4, 5, 8, 21):
        assert_as_exact(PagedSequences(model, 2).run_in_chunks(1, ids, chunk), reference, ids)


@pytest.mark.parametrize("name", ROPE_VARIANTS)
def test_logits_equal_transformers_for_every_rope_type(name, tiny_model):
    parameters = {"rope_theta": 10_000.0, **ROPE_VARIANTS[name]}
    reference, folder = tiny_model("Llama", rope_parameters=parameters)
    model = load_model(folder, device=CPU, dtype=torch.float32)
    ids = token_ids(20)
    for chunk in (1, 20):  # longrope: both sides of its switch at 24 are in test_rotary
        assert_as_exact(PagedSequences(model, 1).run_in_chunks(0, ids, chunk), reference, ids)


def test_mixed_batch_equals_each_row_alone(tiny_model):
    reference, folder = tiny_model("Qwen3")
    batch = PagedSequences(load_model(folder, device=CPU, dtype=torch.float32), 5)
    sequences = {slot: token_ids(length, seed=slot) for slot, length in enumerate((30, 9, 17, 4, 12))}
    for slot in (0, 1, 2):
        batch.step({slot: sequences[slot][:-1]})
    batch.step({4: sequences[4][:5]})
    decode = {slot: sequences[slot][-1:] for slot in (2, 0, 1)}
    logits = batch.step({**decode, 3: sequences[3], 4: sequences[4][5:]}, padding_tokens=3)
    for slot, rows in logits.items():
        assert_as_exact(rows, reference, sequences[slot])


def test_bfloat16_is_as_close_to_float32_as_transformers(tiny_model):
    reference, folder = tiny_model("Qwen3")
    ids = token_ids(60)
    exact = reference_logits(reference, ids)
    theirs = reference_logits(reference.to(torch.bfloat16), ids).float()
    sequences = PagedSequences(load_model(folder, device=CPU, dtype=torch.bfloat16), 1)
    ours = torch.cat([sequences.run_in_chunks(0, ids[:40], 40), sequences.run_in_chunks(0, ids[40:], 1)])
    assert (ours - exact).pow(2).mean() < 1.5 * (theirs - exact).pow(2).mean()


@pytest.mark.parametrize("prompt_length", [20, 30])
@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_generation_across_a_length_switch_equals_transformers(rope_type, prompt_length, tiny_model):
    """Frequencies change where the sequence outgrows 24 tokens; generation goes on as in transformers."""
    parameters = {"rope_theta": 10_000.0, **ROPE_VARIANTS[rope_type]}
    max_length = 24 if rope_type == "dynamic" else 256
    reference, folder = tiny_model("Llama", rope_parameters=parameters, max_position_embeddings=max_length)
    prompt = token_ids(prompt_length)
    reference.generation_config.eos_token_id = None
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    model = load_model(folder, device=CPU, dtype=torch.float32)
    sequences = PagedSequences(model, 1, prompt_lengths=[prompt_length])
    ours = [int(sequences.run_in_chunks(0, prompt, 7)[-1].argmax())]
    while len(ours) < 12:
        ours.append(int(sequences.step({0: ours[-1:]})[0].argmax()))
    assert ours == expected[0, prompt_length:].tolist()


@pytest.mark.parametrize("rope_type", ["default", "longrope", "dynamic"])
def test_the_model_runs_on_the_reference_and_with_prompt_lengths(rope_type, tiny_model, monkeypatch):
    """What a GPU runs when no kernel fits gives the same logits as the CPU path."""
    monkeypatch.setattr("worker_proc.attention.cpu_attention", attention_reference)
    parameters = {"rope_theta": 10_000.0, **ROPE_VARIANTS.get(rope_type, {"rope_type": rope_type})}
    reference, folder = tiny_model("Qwen3", rope_parameters=parameters)
    model = load_model(folder, device=CPU, dtype=torch.float32)
    ids = token_ids(30)
    sequences = PagedSequences(model, 2, prompt_lengths=[30, 30])
    assert_as_exact(sequences.run_in_chunks(1, ids, 7), reference, ids)
