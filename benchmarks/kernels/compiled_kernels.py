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


def resources(kernel: NeededKernel) -> dict[str, Any]:
    """Compile a kernel, or take it from disk; what a program of it needs: `registers` and `stack_bytes` of a thread,
    `shared_bytes`, `threads`; and `float8_read_back`, which should be none."""
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
        "float8_read_back": _float8_read_back(machine_code(kernel)),
    }


def _float8_read_back(code: str) -> int:
    """How often a kernel that makes float8 of something also makes something of float8.

    What it reads so has come out of registers that nothing had written, when it was a number that the kernel stored in
    a word of four (ptxas of Triton 3.6): garbage, in one number of four.
    """
    return code.count("E4M3.UNPACK") if ".E4M3.F32.PACK" in code else 0


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
