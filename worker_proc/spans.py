"""Named ranges in the worker's traces: the parts of a step, for torch's profiler and (on a GPU) for Nsight Systems.

While nothing is traced, `span` costs one function call. Only `tracing` switches it on.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

_NOTHING = contextlib.nullcontext()
_on = False


def span(name: str) -> AbstractContextManager[None]:
    """A range of that name, from entering to leaving."""
    return _range(name) if _on else _NOTHING


def switch(on: bool) -> None:
    """Mark ranges from now on, or no more."""
    global _on  # noqa: PLW0603
    _on = on


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    nvtx = torch.cuda.is_available()
    if nvtx:
        torch.cuda.nvtx.range_push(name)
    with torch.profiler.record_function(name):
        yield
    if nvtx:
        torch.cuda.nvtx.range_pop()
