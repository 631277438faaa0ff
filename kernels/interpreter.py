"""Runs the kernels on a machine without a GPU, in Triton's interpreter: for tests and smoke runs, too slow to serve.

`enable` must be called before any kernel's module is imported. The interpreter computes bf16 products wrongly; use
float32 or float16 there. Called by tests/conftest.py and the benchmarks' smoke runs.
"""

from __future__ import annotations

import os


def enable() -> None:
    """Switch the interpreter on for kernels defined from now on.

    The interpreter keeps scalars as arrays of one element, which NumPy 2.4 no longer turns into an int, so that a
    `range` over a loaded length fails there; `_index_one_element` reads such a scalar until Triton does so itself. It
    also cuts numbers off where a GPU rounds them to FP8 or bfloat16, see `_round_to_nearest`.
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
    _round_to_nearest(interpreter)


def _index_one_element(scalar) -> int:
    return int(scalar.handle.data.item())


def _round_to_nearest(interpreter) -> None:
    """Float32 to FP8 (e4m3) and bfloat16 as a GPU does it: to the nearest, ties to even."""
    import numpy as np
    import torch
    from triton.language import bfloat16, float8e4nv, float32

    convert = interpreter._convert_float
    rounded = {float8e4nv: (torch.float8_e4m3fn, torch.uint8), bfloat16: (torch.bfloat16, torch.uint16)}

    def convert_float(values, input_type, output_type, rounding_mode) -> np.ndarray:
        if input_type != float32 or output_type not in rounded:
            return convert(values, input_type, output_type, rounding_mode)
        dtype, bits = rounded[output_type]
        numbers = np.ascontiguousarray(values).view(np.float32)
        return torch.from_numpy(numbers).to(dtype).view(bits).numpy()

    interpreter._convert_float = convert_float
