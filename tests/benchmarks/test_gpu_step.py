"""The table of kernel times: overlapping kernels are each charged with what they add."""

from types import SimpleNamespace

import torch

from benchmarks.gpu_step import kernel_times


def event(name: str, start: float, end: float, device=torch.autograd.DeviceType.CUDA):
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


def test_what_kernels_add_is_the_whole_time():
    events = [
        event("product", 10, 20),
        event("attention", 12, 50),  # launched early: it waits until 20
        event("product", 51, 60),  # behind a gap
        event("cudaLaunchKernel", 0, 100, torch.autograd.DeviceType.CPU),
    ]
    times = dict(kernel_times(events))
    assert times == {"attention": (1, 38, 30), "product": (2, 19, 20)}
    assert sum(added for _, _, added in times.values()) == 60 - 10


def test_nothing_on_the_device():
    assert kernel_times([]) == []
