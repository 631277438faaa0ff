"""The deterministic CPU model: right, and cut into groups at the right places."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.paged import PagedSequences
from worker_proc.fixed_order_attention import first_key
from worker_proc.fixed_order_model import GROUP_TOKENS, aligned_threads, group_context
from worker_proc.loader import load_model

DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 6}),
        ("Llama", {"max_position_embeddings": 24, "rope_parameters": DYNAMIC_ROPE}),
    ],
)
def test_greedy_equals_transformers(family, values, tiny_model, make_driver, reference_tokens):
    reference, folder = tiny_model(family, **values)
    driver = make_driver(folder, deterministic=True)
    requests = [driver.add([3 + (7 * i + length) % 100 for i in range(length)]) for length in (1, 9, 20)]
    driver.run(requests, 8, chunk=13)
    for request in requests:
        ids = request.tokens[: request.prompt_count]
        assert request.output == reference_tokens(reference, ids, 8), f"prompt of {len(ids)}"


def test_a_group_holds_the_parts_of_its_rows(tiny_model):
    """Rows of 1, 20 and 12 tokens with some context before them, seen from the second group."""
    _, folder = tiny_model("Qwen3")
    sequences = PagedSequences(load_model(folder, device=torch.device("cpu"), dtype=torch.float32), 3)
    sequences.lengths = [4, 5, 0]
    whole = replace(sequences.context({0: 1, 1: 20, 2: 12}), prompt_lengths=torch.tensor([5, 25, 12]))
    first, second, last = (group_context(whole, start, count) for start, count in ((0, 16), (16, 16), (32, 1)))
    assert [group.row_slots.tolist() for group in (first, second, last)] == [[0, 1, -1], [1, 2, -1], [2, -1]]
    assert [group.query_starts.tolist() for group in (first, second, last)] == [
        [0, 1, 16, 16],
        [0, 5, 16, 16],
        [0, 1, 16],
    ]
    assert [group.context_lengths.tolist() for group in (first, second, last)] == [[5, 20, 0], [25, 11, 0], [12, 0]]
    assert second.prompt_lengths.tolist() == [25, 12, 0]
    assert last.slot_mapping.tolist() == [int(whole.slot_mapping[32]), *[-1] * (GROUP_TOKENS - 1)]


def test_keys_begin_at_multiples_that_depend_on_the_position_alone():
    assert [first_key(tile, None) for tile in (0, 9)] == [0, 0]
    assert [first_key(tile, 20) for tile in range(4)] == [0, 0, 0, 16]
    assert first_key(3, 1) == 48


@pytest.mark.parametrize(
    ("intermediate", "most", "threads"), [(1536, 8, 8), (8192, 8, 8), (11008, 8, 4), (11008, 4, 4)]
)
def test_threads_share_whole_rows(intermediate, most, threads):
    config = SimpleNamespace(hidden_size=2048, intermediate_size=intermediate, head_count=16, head_dim=128)
    assert aligned_threads(config, most) == threads
