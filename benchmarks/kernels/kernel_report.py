"""What each kernel of a model's steps is compiled to, for a card that need not be there.

    python -m benchmarks.kernels.kernel_report [--model FOLDER] [--kv-cache-dtype int8] [--only decode] [--code FOLDER]

One line for each kernel that the worker would compile at start: registers and stack of a thread, shared memory, how
many programs a multiprocessor holds, instructions in all and of the kinds that tell most. Stack beside few registers
means spills: LDL and STL count what they cost. `--code` keeps the machine code of each kernel, to be read.

It compiles for a minute where Triton's folder on disk has nothing yet. The test of the shipped kernels calls
`shipped_kernels`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.compiled_kernels import instructions, machine_code, resident_programs, resources
from benchmarks.kernels.pretended_gpu import CARD, Card, pretended_gpu
from common.processors import granted_threads
from kernels.compile_ahead import NeededKernel, compile_all, launches_left_out

MODEL = Path(__file__).parents[1] / "models" / "qwen3-0.6b"
MAX_ROWS, MAX_TOKENS, MAX_LEN = 256, 8192, 4096
BLOCK_SIZE = 16
KINDS = {
    "mma": ("HMMA", "IMMA", "HGMMA", "IGMMA"),
    "copy": ("LDGSTS", "UBLKCP", "UTMALDG"),
    "ldsm": ("LDSM",),
    "lds": ("LDS",),
    "sts": ("STS", "STSM"),
    "shfl": ("SHFL",),
    "bar": ("BAR", "SYNCS"),
    "ldl": ("LDL",),
    "stl": ("STL",),
}


def shipped_kernels(folder: Path, kv_cache_dtype: str, card: Card) -> list[NeededKernel]:
    """What the worker compiles at start for the model that `folder/config.json` describes, in bfloat16."""
    from kernels.step_layout import PlanLayout
    from worker_proc.cuda.buckets import compiled_buckets
    from worker_proc.cuda.fused_forward import FusedForward
    from worker_proc.cuda.slots import DeviceSlots
    from worker_proc.cuda.step_program import StepProgram
    from worker_proc.kv_cache import KVCache, cache_specs
    from worker_proc.loader import build_model
    from worker_proc.model_config import read_model_config

    with pretended_gpu(card), torch.inference_mode(), launches_left_out() as needed:
        config = read_model_config(folder)
        model = build_model(config, CARD, torch.bfloat16)
        model.pack()
        forward = FusedForward(model, max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, max_positions=MAX_LEN)
        slots = DeviceSlots(MAX_ROWS, MAX_LEN, BLOCK_SIZE, config.vocab_size, CARD)
        cache = KVCache(
            cache_specs(config, torch.bfloat16, kv_cache_dtype), block_size=BLOCK_SIZE, block_count=1,
            host_block_count=0, device=CARD,
        )  # fmt: skip
        layout = PlanLayout(MAX_ROWS, 1)
        plan = torch.zeros(layout.size, dtype=torch.int32, device=CARD)
        options = {"max_tokens": MAX_TOKENS, "vocabulary": config.vocab_size, "eager": True}
        program = StepProgram(forward, cache, slots, plan, layout, **options)
        for bucket in compiled_buckets(MAX_ROWS, MAX_TOKENS):
            program.rehearse(bucket)
    return needed


def row_of(kernel: NeededKernel, card: Card) -> str:
    """A line of the table."""
    found, counts = resources(kernel), instructions(kernel)
    room = resident_programs(found, card.shared_memory_per_block_optin)
    figures = [found[name] for name in ("threads", "registers", "stack_bytes", "shared_bytes")]
    figures += [room, counts.total(), *(sum(counts[name] for name in names) for names in KINDS.values())]
    return f"{found['name']:<30}" + "".join(f"{figure:>8}" for figure in figures)


def main() -> None:
    """Print the table; keep the machine code where wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="a folder with config.json")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8", "fp8"))
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--code", type=Path, default=None, help="a folder for the machine code")
    arguments: Any = parser.parse_args()
    card = Card()
    needed = [
        kernel
        for kernel in shipped_kernels(arguments.model, arguments.kv_cache_dtype, card)
        if arguments.only in kernel.function.fn.__name__
    ]
    compile_all(needed, processes=granted_threads())
    columns = ("threads", "regs", "stack", "shared", "fit", "instr", *KINDS)
    print(f"{'kernel':<30}" + "".join(f"{name:>8}" for name in columns))
    for number, kernel in enumerate(needed):
        print(row_of(kernel, card), flush=True)
        if arguments.code is not None:
            arguments.code.mkdir(parents=True, exist_ok=True)
            path = arguments.code / f"{number:02}{kernel.function.fn.__name__}.sass"
            path.write_text(machine_code(kernel))


if __name__ == "__main__":
    main()
