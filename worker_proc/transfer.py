"""Copies between host and device that nobody waits for.

On a GPU they go through page-locked memory, which its allocator keeps until the copy is done. On the CPU, "to the
device" copies nothing.
"""

import numpy as np
import torch


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor on the device with these values, in stream order."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """Host memory that will hold the tensor's values once the stream has come this far."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True).numpy()
