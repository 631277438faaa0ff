"""Times one forward pass on the CPU, decode and prefill, and says where the time goes.

    python -m benchmarks.cpu_forward                       # the default model, bfloat16 where the CPU has it
    python -m benchmarks.cpu_forward --dtype float32 --contexts 100,2000
    python -m benchmarks.cpu_forward --smoke               # a second, for the test suite

Each part (linear layers, attention, norms, rotation, lm_head) is timed alone over all layers on inputs of the step's
shapes; `other` is the rest of the step: additions, views and Python. The last line is one JSON object.
"""

# ruff: noqa: E402 - one call comes before torch is imported

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

from worker_proc.main import limit_spinning

limit_spinning()  # before torch is imported, as in the worker

import torch

from worker_proc.attention import attention
from worker_proc.fetch_model import fetch_model
from worker_proc.forward_context import ForwardContext
from worker_proc.loader import load_model, resolve_dtype
from worker_proc.model_config import read_model_config
from worker_proc.models.llama import LlamaForCausalLM

BLOCK_SIZE = 16


def best_ms(function: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` runs, in milliseconds; one run before warms up."""
    function()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


class Workload:
    """`batch` rows, each with `context_length` cached tokens of which `query_count` are computed in this step."""

    def __init__(self, model: LlamaForCausalLM, batch: int, context_length: int, query_count: int) -> None:
        config, dtype = model.config, model.model.norm.weight.dtype
        self.model, self.batch, self.context_length, self.query_count = model, batch, context_length, query_count
        self.token_count = batch * query_count
        width = -(-context_length // BLOCK_SIZE)
        self.block_tables = torch.randperm(batch * width, dtype=torch.int32).view(batch, width)
        shape = (batch * width, config.kv_head_count, BLOCK_SIZE, config.head_dim)
        self.caches = [[torch.randn(shape, dtype=dtype) for _ in range(config.layer_count)] for _ in range(2)]
        self.positions = torch.arange(context_length - query_count, context_length).repeat(batch)
        self.token_ids = torch.randint(0, config.vocab_size, (self.token_count,), dtype=torch.int32)
        self.sampled = torch.arange(query_count - 1, self.token_count, query_count)

    def context(self) -> ForwardContext:
        """A fresh context, as every step has one."""
        rows = torch.arange(self.batch)
        blocks = self.block_tables[rows.repeat_interleave(self.query_count), self.positions // BLOCK_SIZE].long()
        return ForwardContext(
            slot_mapping=blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE,
            row_slots=rows.int(),
            query_starts=torch.arange(0, self.token_count + 1, self.query_count, dtype=torch.int32),
            context_lengths=torch.full((self.batch,), self.context_length, dtype=torch.int32),
            block_tables=self.block_tables,
            key_caches=self.caches[0],
            value_caches=self.caches[1],
            block_size=BLOCK_SIZE,
            decode_row_count=self.batch if self.query_count == 1 else 0,
        )

    def step(self) -> torch.Tensor:
        """The whole forward pass, logits of each row's last token included."""
        hidden = self.model(self.token_ids, self.positions, self.context())
        return self.model.compute_logits(hidden if self.query_count == 1 else hidden[self.sampled])


def time_parts(work: Workload, repeats: int) -> dict[str, float]:
    """Milliseconds of the step and of each part."""
    model, config = work.model, work.model.config
    layers, dtype = model.model.layers, model.model.norm.weight.dtype
    hidden = torch.randn(work.token_count, config.hidden_size, dtype=dtype)
    inner = torch.randn(work.token_count, config.intermediate_size, dtype=dtype)
    heads = torch.randn(work.token_count, config.head_count + 2 * config.kv_head_count, config.head_dim, dtype=dtype)
    query, key, value = heads.split((config.head_count, config.kv_head_count, config.kv_head_count), dim=1)
    query = query.contiguous()
    flat = query.flatten(1)
    angles = model.rotary.angles(work.positions)

    def linears() -> None:
        for layer in layers:
            layer.self_attn.qkv_proj(hidden)
            layer.self_attn.o_proj(flat)
            layer.mlp.gate_up_proj(hidden)
            layer.mlp.down_proj(inner)

    def attend() -> None:
        context = work.context()
        for layer in layers:
            attn = layer.self_attn
            attention(
                query, key, value, attn.layer_index, context, scale=attn.scale, sliding_window=attn.sliding_window
            )

    parts = {
        "step": best_ms(work.step, repeats),
        "linears": best_ms(linears, repeats),
        "attention": best_ms(attend, repeats),
        "norms": best_ms(lambda: [model.model.norm(hidden) for _ in range(2 * len(layers) + 1)], repeats),
        "rotation": best_ms(lambda: [angles.apply(heads[:, : -config.kv_head_count]) for _ in layers], repeats),
        "lm_head": best_ms(lambda: model.compute_logits(hidden[work.sampled]), repeats),
    }
    parts["other"] = parts["step"] - sum(value for name, value in parts.items() if name != "step")
    return {name: round(value, 3) for name, value in parts.items()}


def integers(text: str) -> list[int]:
    """`1,16` -> [1, 16]."""
    return [int(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", type=integers, default=[1, 16])
    parser.add_argument("--contexts", type=integers, default=[100, 500, 2000], help="cached tokens of a decode row")
    parser.add_argument("--prompts", type=integers, default=[128, 512], help="tokens of a prompt computed in one step")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--smoke", action="store_true", help="one small shape")
    options = parser.parse_args()
    if options.smoke:
        options.batches, options.contexts, options.prompts, options.repeats = [2], [20], [8], 1
    return options


def main() -> None:
    """Print a line per shape, then everything as JSON."""
    options = parse_arguments()
    folder, device = Path(fetch_model(options.model)), torch.device("cpu")
    dtype = resolve_dtype(options.dtype, read_model_config(folder), device)
    results = []
    with torch.inference_mode():
        model = load_model(folder, device=device, dtype=dtype, load_format=options.load_format)
        shapes = [(batch, context, 1) for batch in options.batches for context in options.contexts]
        shapes += [(1, prompt, prompt) for prompt in options.prompts]
        for batch, context, query_count in shapes:
            parts = time_parts(Workload(model, batch, context, query_count), options.repeats)
            rate = batch * query_count / parts["step"] * 1e3
            results.append(
                {"batch": batch, "context": context, "queries": query_count, "ms": parts, "tokens_per_s": rate}
            )
            print(
                f"batch {batch:3} context {context:5} queries {query_count:4}: {rate:8.1f} tok/s  {parts}", flush=True
            )
    summary = {
        "benchmark": "cpu_forward",
        "dtype": str(dtype),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps({**summary, "machine": platform.processor() or platform.machine(), "results": results}))


if __name__ == "__main__":
    main()
