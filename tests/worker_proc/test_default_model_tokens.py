"""The default model's greedy tokens are those of transformers, on real weights.

Each of our tokens is held against the reference's logits in float32 after the very tokens that we produced, so that one
flip does not hide what follows it. A token that is not the reference's first must be a near tie there:

- float32: the two logits differ by at most 1e-3, a hundred times what float32 products of this size err by;
- bfloat16: by at most twice the largest error of a logit that transformers itself makes in bfloat16 on these
  positions. A correct bfloat16 pass errs by as much, and changes the order of two logits only if their errors
  together exceed their difference. And nearly all tokens must be the reference's first.

The model is taken from the usual cache; where it is not, the test says so.
"""

import pytest
import torch
import transformers

from common.model_cache import default_model_dir

PROMPTS = [
    "The capital of France is", "Once upon a time there was a", "def fibonacci(n):", "Water boils at", "1, 2, 3, 5, 8,",
    "The three primary colours are", "To be or not to be,", "In the year 1969", "The mitochondria is the",
    "SELECT name", "My favourite recipe for bread", "Dear Sir or Madam,", "The speed of light is", "Roses are red,",
    "The largest planet of the solar system", "import numpy as np", "A triangle has three", "Breaking news:",
    "Photosynthesis is", "Why did the chicken",
]  # fmt: skip
OUTPUT_COUNT = 64
FLOAT32_TIE = 1e-3
LEAST_AGREEMENT = {torch.float32: 0.999, torch.bfloat16: 0.95}
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)


@pytest.fixture
def model_folder():
    folder = default_model_dir()
    if not folder.is_dir():
        pytest.skip(f"the default model is not in {folder}; `python launch.py --once hello` puts it there")
    return folder


def reference_logits(folder, dtype: torch.dtype, device: str, sequences: list[list[int]], prompt_counts: list[int]):
    """transformers' logits [OUTPUT_COUNT, vocab] in float32 of each sequence's positions that predict its output."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    with torch.inference_mode():
        return [
            model(torch.tensor([ids], device=device)).logits[0, count - 1 : -1].float()
            for ids, count in zip(sequences, prompt_counts, strict=True)
        ]


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_greedy_tokens_are_those_of_transformers(device, dtype, model_folder, make_driver):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    driver = make_driver(
        model_folder, slot_count=20, block_count=600, vocab=len(tokenizer), kernels=device == "cuda", dtype=dtype
    )
    requests = [driver.add(tokenizer(text).input_ids) for text in PROMPTS]
    driver.run(requests, OUTPUT_COUNT)
    asked = [request.tokens for request in requests], [request.prompt_count for request in requests]
    exact = reference_logits(model_folder, torch.float32, device, *asked)
    tie = FLOAT32_TIE
    if dtype == torch.bfloat16:
        rounded = reference_logits(model_folder, dtype, device, *asked)
        errors = [(a - b).gather(1, b.topk(2).indices).abs().max() for a, b in zip(rounded, exact, strict=True)]
        tie = 2 * float(torch.stack(errors).max())
    gaps = torch.stack([gaps_of(logits, request.output) for logits, request in zip(exact, requests, strict=True)])
    agreement = float((gaps == 0).float().mean())
    prompt, place = divmod(int(gaps.argmax()), OUTPUT_COUNT)
    assert gaps.max() <= tie, (
        f"{PROMPTS[prompt]!r}, token {place}: {gaps.max():.4f} below the first; a tie is {tie:.4f}"
    )
    assert agreement >= LEAST_AGREEMENT[dtype], f"only {agreement:.4f} of the tokens are the reference's first"


def gaps_of(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """How far each token's logit lies below the greatest of its position, [n]."""
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return (logits.max(1).values - chosen).cpu()
