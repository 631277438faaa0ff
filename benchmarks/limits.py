"""The best that the card could do: measures its limits and derives a lower bound for each workload, beside its result.

    python -m benchmarks.limits --model benchmarks/models/qwen3-0.6b
    python -m benchmarks.limits --read-tb-per-s 4.24 --matmul-tflop-per-s 700      # without measuring

A workload's bound is the time of the bytes that must be read or of the operations that must be done, whichever is
longer in each step: every prompt is computed once; then, for each output token after the first, all weights are read
once per step, and every running request's keys and values once. Launches, messages and imperfect kernels are not
counted. Results are the newest ones of `benchmarks/results/throughput.jsonl` for the model with a plain cache on a GPU.
Ends with one JSON line. `python -m benchmarks.throughput --limits` keeps the bounds with what it measures.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import records, workloads
from benchmarks.workloads import Workload
from worker_proc.model_config import ModelConfig, read_model_config

ELEMENT_BYTES = 2
SCALE_BYTES = 2
"""Of an 8-bit cache, beside the `head_dim` bytes of each token and head."""
MAX_STEP_TOKENS = 8192


@dataclass(frozen=True)
class Ceilings:
    """Of one card: bytes read a second, and bfloat16 matrix operations a second."""

    read_bytes_per_s: float
    matmul_flop_per_s: float


@dataclass(frozen=True)
class ModelCost:
    """What a model costs: weights of a layer stack and of the output projection, and what one token keeps.

    layer_weights: parameters that every token passes; head_weights: those of the output projection.
    kv_bytes: bytes of keys and values of one token, all layers.
    attention_flop: operations for one query token on one cached token, all layers.
    """

    layer_weights: int
    head_weights: int
    kv_bytes: int
    attention_flop: int

    @classmethod
    def of(cls, config: ModelConfig) -> "ModelCost":
        """From a configuration of the Llama family."""
        heads = config.head_count + 2 * config.kv_head_count
        attention = config.hidden_size * config.head_dim * (heads + config.head_count)
        feed_forward = 3 * config.hidden_size * config.intermediate_size
        return cls(
            layer_weights=config.layer_count * (attention + feed_forward),
            head_weights=config.hidden_size * config.vocab_size,
            kv_bytes=2 * ELEMENT_BYTES * config.layer_count * config.kv_head_count * config.head_dim,
            attention_flop=4 * config.layer_count * config.head_count * config.head_dim,
        )

    def in_8_bits(self, config: ModelConfig) -> "ModelCost":
        """The same over an 8-bit cache."""
        return replace(self, kv_bytes=2 * config.layer_count * config.kv_head_count * (config.head_dim + SCALE_BYTES))


def prefill_bound_s(cost: ModelCost, lengths: list[int], ceilings: Ceilings) -> float:
    """Seconds for all prompts, in steps of at most MAX_STEP_TOKENS tokens."""
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    flop = 2 * cost.layer_weights * sum(lengths) + 2 * cost.head_weights * len(lengths) + cost.attention_flop * pairs
    steps = -(-sum(lengths) // MAX_STEP_TOKENS)
    read_bytes = ELEMENT_BYTES * (cost.layer_weights + cost.head_weights) * steps
    return max(flop / ceilings.matmul_flop_per_s, read_bytes / ceilings.read_bytes_per_s)


def decode_bound_s(cost: ModelCost, workload: Workload, ceilings: Ceilings) -> float:
    """Seconds for the output tokens after the first, all requests running from the start."""
    total = 0.0
    weights = cost.layer_weights + cost.head_weights
    for step in range(1, max(workload[1])):
        contexts = [len(p) + step for p, count in zip(*workload, strict=True) if count > step]
        read_bytes = ELEMENT_BYTES * weights + cost.kv_bytes * sum(contexts)
        flop = 2 * weights * len(contexts) + cost.attention_flop * sum(contexts)
        total += max(read_bytes / ceilings.read_bytes_per_s, flop / ceilings.matmul_flop_per_s)
    return total


def bound_s(cost: ModelCost, workload: Workload, ceilings: Ceilings) -> float:
    """Seconds that the workload takes at least."""
    return prefill_bound_s(cost, list(map(len, workload[0])), ceilings) + decode_bound_s(cost, workload, ceilings)


def limit_of(entry: dict[str, Any], folder: Path, ceilings: Ceilings) -> dict[str, float]:
    """What a result of `throughput` keeps as its limit: the bound, how much of its speed was reached, the ceilings."""
    config = read_model_config(folder)
    cost = ModelCost.of(config)
    if not has_plain_cache(entry):
        cost = cost.in_8_bits(config)
    bound = bound_s(cost, workloads.load(entry["workload"]), ceilings)
    return {
        "bound_s": float(f"{bound:.4g}"),
        "ratio": round(bound / entry["metrics"]["wall_s"], 3),
        "read_tb_per_s": round(ceilings.read_bytes_per_s / 1e12, 3),
        "bf16_tflop_per_s": round(ceilings.matmul_flop_per_s / 1e12, 1),
    }


def has_plain_cache(entry: dict[str, Any]) -> bool:
    """Whether a result was measured with keys and values in bfloat16."""
    return entry["options"].get("kv_cache_dtype", "auto") == "auto"


def measured_ceilings() -> Ceilings:
    """Those of the GPU at hand. RuntimeError without one."""
    from benchmarks.kernels.harness import has_cuda, limits

    if not has_cuda():
        raise RuntimeError("no GPU here: give --read-tb-per-s and --matmul-tflop-per-s")
    found = limits()
    return Ceilings(found.read_tb_per_s * 1e12, found.bf16_tflop_per_s * 1e12)


def newest_results(model: str, path: Path) -> dict[str, dict[str, Any]]:
    """Workload -> metrics of this engine's newest result for the model with a plain cache, on any GPU."""
    if not path.exists():
        return {}
    entries = map(json.loads, path.read_text().splitlines())
    return {
        entry["workload"]: entry["metrics"]
        for entry in entries
        if entry["model"] == model
        and entry["engine"] == "trireme"
        and "cores" not in entry["device"]
        and has_plain_cache(entry)
    }


def main() -> None:
    """Parse, measure or take the ceilings, print each workload's bound."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="benchmarks/models/qwen3-0.6b", help="folder with config.json")
    parser.add_argument("--read-tb-per-s", type=float, default=0.0)
    parser.add_argument("--matmul-tflop-per-s", type=float, default=0.0)
    args = parser.parse_args()
    given = args.read_tb_per_s and args.matmul_tflop_per_s
    ceilings = (
        Ceilings(args.read_tb_per_s * 1e12, args.matmul_tflop_per_s * 1e12) if given else measured_ceilings()
    )  # fmt: skip
    folder = Path(args.model)
    cost = ModelCost.of(read_model_config(folder))
    results = newest_results(folder.name, records.RESULTS_DIR / "throughput.jsonl")
    print(f"read {ceilings.read_bytes_per_s / 1e12:.2f} TB/s, matmul {ceilings.matmul_flop_per_s / 1e12:.0f} TFLOP/s")
    rows = {}
    for name in workloads.WORKLOADS:
        bound = bound_s(cost, workloads.load(name), ceilings)
        measured = results.get(name, {}).get("wall_s")
        rows[name] = {"bound_s": round(bound, 5), "measured_s": measured}
        share = f"{measured:9.4f} s measured, {bound / measured:5.0%} of the bound's speed" if measured else ""
        print(f"{name:<14}{bound:9.4f} s bound {share}")
    print(json.dumps({"model": folder.name, "ceilings": asdict(ceilings), "workloads": rows}))


if __name__ == "__main__":
    main()
