"""Traces of the worker with torch's profiler: operators, kernels, and the parts of each step as named ranges.

They open in Perfetto. Used by the worker's main loop and by its replay.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from worker_proc import spans


class TorchTracer:
    """torch.profiler with the ranges of `spans`; the same interface as `common.tracing.Tracer`."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    def start(self) -> None:
        """Watch from here on."""
        spans.switch(True)
        self._profile.start()

    def stop(self, path: Path) -> None:
        """Watch no more, wait for the device, and write what was seen."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        spans.switch(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))
