"""The default model as converted: tokenizer, logits and greedy tokens equal transformers' from the same folder."""

import json

import pytest
import torch
import transformers

from common.messages import SlotSampling
from tests.support.paged import PagedSequences
from worker_proc.loader import load_model
from worker_proc.model_config import read_model_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer(default_model_dir):
    return transformers.AutoTokenizer.from_pretrained(default_model_dir)


@pytest.fixture(scope="module")
def reference(default_model_dir):
    return transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt(tokenizer) -> list[int]:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_configuration(default_model_dir):
    config = read_model_config(default_model_dir)
    assert (config.layer_count, config.hidden_size, config.head_count, config.kv_head_count) == (30, 576, 9, 3)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.tie_word_embeddings


def test_it_is_sampled_as_its_card_recommends(default_model_dir):
    settings = json.loads((default_model_dir / "generation_config.json").read_text())
    assert (settings["temperature"], settings["top_p"], settings["eos_token_id"]) == (0.2, 0.9, [2])


def test_tokenizer(tokenizer, prompt):
    text = "Hello  world!\n\n  def f(x):\n\treturn x**2  # 12345 ça va? don't 日本語 🙂"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 305").input_ids) == ["a", "Ġ", "3", "0", "5"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("I'm here").input_ids) == ["I", "'m", "Ġhere"]
    assert prompt[0] == tokenizer.convert_tokens_to_ids("<|im_start|>") == 1
    assert tokenizer.decode(prompt).endswith(
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_float32_logits_and_greedy_tokens_equal_transformers(default_model_dir, reference, prompt):
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
    with torch.no_grad():
        expected_logits = reference(torch.tensor([prompt])).logits[0]
    model = load_model(default_model_dir, device=CPU, dtype=torch.float32)
    sequences = PagedSequences(model, 2, block_size=16, max_blocks=8)
    logits = sequences.run_in_chunks(1, prompt, 17)
    assert (logits - expected_logits).abs().max() < 1e-5 * expected_logits.abs().max()
    ours = [int(logits[-1].argmax())]
    while len(ours) < len(expected):
        ours.append(int(sequences.step({1: ours[-1:]})[1].argmax()))
    assert ours == expected


def test_embeddings_equal_transformers(default_model_dir, reference, prompt, make_driver, reference_embedding):
    driver = make_driver(default_model_dir, vocab=49152, block_size=16)
    poolings = ("mean", "last")
    requests = [driver.add(prompt, SlotSampling(temperature=0.0, pooling=pooling)) for pooling in poolings]
    driver.run(requests, 1, chunk=13)
    for request, pooling in zip(requests, poolings, strict=True):
        expected = reference_embedding(reference, prompt, pooling)
        assert (torch.tensor(request.embedding) - expected).abs().max() < 1e-5 * expected.abs().max(), pooling


def test_bfloat16_is_no_further_from_float32_than_transformers_is(default_model_dir, reference, prompt):
    with torch.no_grad():
        exact = reference(torch.tensor([prompt])).logits[0]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.bfloat16)
        their_error = (theirs(torch.tensor([prompt])).logits[0].float() - exact).pow(2).mean()
    model = load_model(default_model_dir, device=CPU, dtype=torch.bfloat16)
    ours = PagedSequences(model, 1, block_size=16, max_blocks=8).run_in_chunks(0, prompt, len(prompt))
    assert (ours - exact).pow(2).mean() < 1.2 * their_error
    assert (ours.argmax(-1) == exact.argmax(-1)).float().mean() > 0.9
