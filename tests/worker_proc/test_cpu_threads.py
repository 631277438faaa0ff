"""Small steps run on one thread, large ones on all, and torch is left as it was."""

import json

import pytest
import torch

from worker_proc.cpu_threads import StepThreads, layer_parameters
from worker_proc.model_config import parse_model_config

CONFIG = parse_model_config(
    json.loads(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,'
        '"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}'
    ),
    source="test",
)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_parameters_of_the_default_models_layer():
    assert layer_parameters(CONFIG) == 576 * (9 + 3 + 3) * 64 + 576 * 576 + 3 * 576 * 1536


def test_threads_follow_the_work(two_threads):
    threads = StepThreads(CONFIG)
    assert [threads.count_for(count) for count in (1, 5, 6, 16, 512)] == [1, 1, 2, 2, 2]
    with threads.step(1):
        assert torch.get_num_threads() == 1
    with threads.step(100):
        assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="fault"), threads.step(1):
        raise ValueError("fault")
    assert torch.get_num_threads() == 2
