"""Runs the kernels on a machine without a GPU, in Triton's interpreter: for tests and smoke runs, too slow to serve.

`enable` must be called before any kernel's module is imported. The interpreter computes bf16 products wrongly; use
float32 or float16 there. Called by tests/conftest.py and the benchmarks' smoke runs.
"""

from __future__ import annotations

import os


def enable() -> None:
    """Switch the interpreter on for kernels defined from now on.

    The interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer turns into an int, so that a
    `range` over a loaded length fails there; `_index_one_element` reads such a scalar until Triton does so itself.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_lang_tensor = interpreter._patch_lang_tensor
    if patch_lang_tensor.__module__ == __name__:
        return

    def patch_with_index(tensor, scope) -> None:
        patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", _index_one_element)

    interpreter._patch_lang_tensor = patch_with_index


def _index_one_element(scalar) -> int:
    return int(scalar.handle.data.item())
