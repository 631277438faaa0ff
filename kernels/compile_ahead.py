"""Compiles kernels side by side before they are needed: what a first start on a machine spends most of its time on.

Triton compiles a kernel when a launch first needs it, one after another. Here the launches are gone through without
being made, which tells what they need, and all of it is compiled at once in threads (the compiler's passes and the
assembler run outside Python's lock). Uses Triton's hook for launches that are about to compile
(`triton.knobs.runtime.jit_cache_hook`) and `JITFunction.preload`. Called by the GPU worker's start.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import knobs

Needed = dict[tuple[str, str], Callable[[], object]]
"""What compiles each kernel that was met, by the kernel's name and Triton's key of the variant."""


@contextmanager
def launches_left_out() -> Iterator[Needed]:
    """While open, a launch whose kernel is not compiled is left out and its kernel noted; others are made."""
    needed: Needed = {}

    def note(*, key: str, fn: Any, compile: dict[str, Any], is_manual_warmup: bool, **_: Any) -> bool:
        if is_manual_warmup:
            return False
        function, data = fn.jit_function, compile["specialization_data"]
        needed.setdefault((fn.name, key), lambda: function.preload(data))
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield needed
    finally:
        knobs.runtime.jit_cache_hook = before


def compile_all(needed: Needed, threads: int) -> None:
    """Compile what was noted; the first error of the compiler is raised when all others are done."""
    if not needed:
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        results = [pool.submit(compile_one) for compile_one in needed.values()]
    for result in results:
        result.result()
