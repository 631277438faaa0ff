"""Argument checks shared by the kernels' public functions: each error names what was wanted and what came.

Knows tensors only as shape, dtype, device and strides. Called by every module of `kernels`.
"""

from collections.abc import Sequence

import torch


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    like: torch.Tensor | None = None,
) -> None:
    """Raise ValueError unless `tensor` has this shape (None: any size), one of these dtypes, a contiguous last axis,
    and the device of `like`."""
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    got = tuple(tensor.shape)
    fits = len(got) == len(shape) and all(want is None or want == have for want, have in zip(shape, got, strict=True))
    if not fits:
        wanted = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
        raise ValueError(f"{name}: wanted shape {wanted}, got {list(got)}")
    if tensor.dtype not in allowed:
        raise ValueError(f"{name}: wanted dtype {' or '.join(map(str, allowed))}, got {tensor.dtype}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: wanted a contiguous last axis (stride 1), got strides {tensor.stride()}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name}: wanted device {like.device}, got {tensor.device}")


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
