"""Sampling over a production vocabulary: greedy, plain, and truncated rows, against the time of reading the logits
once.

python -m benchmarks.kernels.bench_sampling --output benchmarks/results/sampling.jsonl

The logits of a row are normal with a deviation of 3; `flat` rows have 0.01, which makes top-p search the whole row, and
`masked` ones allow all ids but every eighth.
"""

from collections.abc import Callable, Iterator

import torch

from benchmarks.kernels.harness import copies_to_exceed_l2
from benchmarks.kernels.runner import Case, device_and_dtype, run

VOCABULARY = 151_936
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "sampled_masked": {"temperature": 1.0, "mask": 0x7F7F7F7F},
    "top_k20_p80": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_p95": {"temperature": 0.7, "top_p": 0.95},
    "flat_top_p95": {"temperature": 0.7, "top_p": 0.95, "deviation": 0.01},
    "min_p10": {"temperature": 1.0, "min_p": 0.1},
    "greedy_logprobs5": {"logprobs": 5},
}


def sampling_call(rows: int, logits: torch.Tensor, setting: dict) -> Callable[[], None]:
    """A launch for `rows` slots that all use one setting."""
    from kernels import sampling_state as columns
    from kernels.sampling import SampledTokens, sample

    device, vocabulary = logits.device, logits.shape[1]
    state = columns.SamplingState.allocate(rows, vocabulary, device, count_rows=1, allowed_rows=1)
    state.allowed[:] = setting.get("mask", 0)
    state.choices[:, columns.ALLOWED_ROW] = 0 if "mask" in setting else -1
    state.numbers[:, columns.TEMPERATURE] = setting.get("temperature", 0.0)
    state.numbers[:, columns.TOP_P] = setting.get("top_p", 1.0)
    state.numbers[:, columns.MIN_P] = setting.get("min_p", 0.0)
    state.choices[:, columns.TOP_K] = setting.get("top_k", 0)
    state.choices[:, columns.LOGPROB_COUNT] = setting.get("logprobs", -1)
    state.choices[:, columns.SEED_LOW] = torch.arange(rows, device=device)
    integers = {"dtype": torch.int32, "device": device}
    workspace = columns.SamplingWorkspace.allocate(rows, vocabulary, device)
    rest = (torch.arange(rows, **integers), torch.arange(rows, **integers), torch.zeros(rows, **integers),
            torch.zeros(rows, 4096, **integers), state, workspace,
            SampledTokens.allocate(rows, 20, device))  # fmt: skip
    return lambda: sample(logits, *rest, vocabulary)


def cases(smoke: bool) -> Iterator[Case]:
    """Batches of one to 256 rows, each in every one of SETTINGS."""
    from kernels.sampling import bytes_moved

    device, _ = device_and_dtype()
    vocabulary = 300 if smoke else VOCABULARY
    for rows in (2,) if smoke else (1, 8, 64, 256):
        for name, setting in SETTINGS.items():
            copies = 1 if smoke else copies_to_exceed_l2(rows * vocabulary * 4, at_most=4)
            deviation = setting.get("deviation", 3.0)
            logits = [torch.randn(rows, vocabulary, device=device) * deviation for _ in range(copies)]
            calls = [sampling_call(rows, row, setting) for row in logits]
            library = [lambda row=row: row.argmax(dim=1) for row in logits] if name == "greedy" else []
            yield Case(f"b{rows}_{name}", bytes_moved(rows, vocabulary, 4), calls, library)


if __name__ == "__main__":
    run(__doc__, "sampling", cases)
