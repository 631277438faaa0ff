"""Fills memory that nobody has written with NaN."""

import torch

from worker_proc.kv_cache import KVCache


def poison(cache: KVCache) -> None:
    """NaN in everything that can hold it, scales included; the largest number in int8."""
    for tensor in cache.tensors():
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0x7F)
        else:
            tensor.fill_(float("nan"))
