"""Rotary frequencies, attention factors and angles equal transformers' own for every rope type it lists (fault F9)."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from worker_proc.layers.rotary import RotaryEmbedding, attention_factor, inverse_frequencies
from worker_proc.model_config import SUPPORTED_ROPE_TYPES, ModelConfig, parse_model_config

HEAD_DIM, MAX_LENGTH, ORIGINAL = 64, 4096, 1024
PARAMETERS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, factor given by lengths": {"factor": None, "original_max_position_embeddings": ORIGINAL},
    "yarn, attention factor": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 0.7},
    "yarn, mscale": {
        "factor": 40.0, "original_max_position_embeddings": ORIGINAL, "mscale": 0.7, "mscale_all_dim": 1.0,
        "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "longrope": {
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1 + i / 50 for i in range(32)], "long_factor": [1 + i / 3 for i in range(32)],
    },
    "longrope, attention factor": {
        "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3,
        "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
    },
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "proportional": {"partial_rotary_factor": 0.25},
    "proportional, factor": {"partial_rotary_factor": 0.5, "factor": 2.0},
}  # fmt: skip


def configs(name: str) -> tuple[LlamaConfig, ModelConfig]:
    rope = {"rope_type": name.split(",", maxsplit=1)[0], "rope_theta": 500_000.0, **PARAMETERS[name]}
    theirs = LlamaConfig(
        hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=MAX_LENGTH, rope_parameters=dict(rope),
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    return theirs, parse_model_config({**theirs.to_dict(), "rope_parameters": rope}, source="test")


def test_every_type_of_transformers_is_known():
    assert set(SUPPORTED_ROPE_TYPES) == {"default", *ROPE_INIT_FUNCTIONS}
    assert {name.split(",")[0] for name in PARAMETERS} == set(SUPPORTED_ROPE_TYPES)


@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_and_attention_factor(name):
    theirs, ours = configs(name)
    embedding = LlamaRotaryEmbedding(theirs)
    torch.testing.assert_close(inverse_frequencies(ours.rope, HEAD_DIM), embedding.inv_freq, rtol=2e-6, atol=0)
    assert attention_factor(ours.rope) == pytest.approx(embedding.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("length", [100, ORIGINAL + 1, MAX_LENGTH + 77])
def test_rotation_of_a_prompt_of_any_length(name, length):
    theirs, ours = configs(name)
    positions = torch.arange(0, length, 13)
    positions = torch.cat((positions, torch.tensor([length - 1])))
    torch.manual_seed(0)
    x = torch.randn(len(positions), 2, HEAD_DIM, dtype=torch.float32)
    cos, sin = LlamaRotaryEmbedding(theirs)(x, positions[None])
    expected = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)[0][0].transpose(0, 1)
    angles = RotaryEmbedding(ours, torch.device("cpu")).angles(positions.int(), torch.full_like(positions, length))
    assert angles.cos.dtype == torch.float32
    angle_error = 2 * length * torch.finfo(torch.float32).eps  # float32 angles round at this size
    torch.testing.assert_close(angles.apply(x), expected, rtol=1e-5, atol=4 * angle_error + 1e-6)


def test_bfloat16_is_rotated_in_float32():
    _, ours = configs("default")
    x = torch.randn(5, 3, HEAD_DIM).bfloat16()
    angles = RotaryEmbedding(ours, torch.device("cpu")).angles(torch.arange(1000, 1005))
    assert torch.equal(angles.apply(x), angles.apply(x.float()).bfloat16())
