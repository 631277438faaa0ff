"""What kernels were compiled to: registers, stack, shared memory, and what their instructions are.

Reads the machine code with the disassemblers that come with Triton; needs no GPU. Called by attention_worker and by
kernel_report.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from triton import knobs

from kernels.compile_ahead import NeededKernel

TIMEOUT_S = 60
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d\s+)?([A-Z0-9_]+)", re.MULTILINE)
_READS_R1 = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+([^;,]+,[^;]*\bR1\b[^;]*);", re.MULTILINE)


def resources(kernel: NeededKernel) -> dict[str, Any]:
    """Compile a kernel, or take it from disk; what a program of it needs: `registers` and `stack_bytes` of a thread,
    `shared_bytes`, `threads`; and `unwritten_reads`, which should be none."""
    found = kernel.function.preload(kernel.specialization)
    usage = _run("cuobjdump", "-res-usage", found.asm["cubin"])
    counts = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    warps = found.metadata.num_warps
    return {
        "name": kernel.function.fn.__name__,
        "registers": counts["REG"],
        "stack_bytes": counts["STACK"],
        "shared_bytes": found.metadata.shared,
        "threads": 32 * warps,
        "unwritten_reads": 0 if counts["STACK"] else len(_unwritten_reads(machine_code(kernel))),
    }


def _unwritten_reads(code: str) -> list[str]:
    """Instructions of a kernel without a stack that read R1, the pointer to it: ptxas names so what is undefined.

    It has been the number that a float8 was made back of in the program that stores it. In a pair that is packed, of
    which only one half is wanted, it is no fault.
    """
    return [line for line in _READS_R1.findall(code) if ".PACK_" not in line]


def instructions(kernel: NeededKernel) -> Counter[str]:
    """How many instructions of each kind the machine code has."""
    return Counter(_INSTRUCTION.findall(machine_code(kernel)))


def machine_code(kernel: NeededKernel) -> str:
    """The kernel disassembled."""
    return _run("cuobjdump", "-sass", kernel.function.preload(kernel.specialization).asm["cubin"])


def _run(tool: str, option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [getattr(knobs.nvidia, tool).path, option, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def resident_programs(found: dict[str, Any], shared_bytes: int) -> int:
    """How many programs of a kernel a multiprocessor holds at once, of 64 Ki registers and so many bytes."""
    warps = found["threads"] // 32
    by_registers = 65_536 // (warps * 256 * -(-found["registers"] // 8)) if found["registers"] else 32
    by_shared = (shared_bytes + 1024) // (found["shared_bytes"] + 1024)
    return min(by_registers, by_shared, 64 // warps)
