"""Argument checks shared by the kernels' public functions: each error names what was wanted and what came.

Knows tensors only as shape, dtype, device, strides and address. Called by every module of `kernels`.
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


def check_head_inputs(
    rope_table: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, head_dim: int,
    like: torch.Tensor,
) -> None:  # fmt: skip
    """What norms and rotates heads: a contiguous float32 [max_position, r], r even and at most head_dim, and both of
    the norms' weights [head_dim] or neither."""
    check_tensor("rope_table", rope_table, (None, None), torch.float32, like=like)
    if rope_table.shape[1] % 2 or rope_table.shape[1] > head_dim or not rope_table.is_contiguous():
        raise ValueError(
            f"rope_table: wanted a contiguous table with an even number of columns up to {head_dim}, "
            f"got {list(rope_table.shape)} with strides {rope_table.stride()}"
        )
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight: wanted both or neither, got one")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_tensor(name, weight, (head_dim,), FLOATS, like=like)


def copies_boxes(*tensors: torch.Tensor) -> bool:
    """Whether the tensor copy engine can copy from these tensors: rows lie, and begin, at multiples of 16 bytes."""
    return all(t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0 for t in tensors)


FLOATS = (torch.bfloat16, torch.float16, torch.float32)
