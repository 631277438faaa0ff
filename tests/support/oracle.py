"""The reference for tokens: transformers in float32."""

from pathlib import Path

import torch
import transformers


def load_oracle(folder: Path) -> transformers.PreTrainedModel:
    """The model as transformers runs it, float32, on the CPU."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(oracle: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """`count` tokens of transformers' own greedy generate."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    return output[0, len(prompt) :].tolist()


def assert_greedy(oracle: transformers.PreTrainedModel, prompt: list[int], output: list[int]) -> None:
    """Each token of `output` is the likeliest after what stands before it.

    By induction this says the same as comparing with `greedy`, and costs one forward pass.
    """
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    wanted = logits.argmax(-1).tolist()
    first = next((i for i, (w, o) in enumerate(zip(wanted, output, strict=True)) if w != o), None)
    assert first is None, (
        f"token {first} is {output[first]}, wanted {wanted[first]} "
        f"(logits {logits[first, output[first]]:.5f} and {logits[first, wanted[first]]:.5f})"
    )
