"""How kernel results are compared: the device and dtypes at hand, and a tolerance that follows from the dtype."""

from collections.abc import Callable

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """|got - exact| / |exact| over the whole tensor, in float64; NaN if either holds one."""
    difference = torch.linalg.vector_norm(got.double() - exact.double())
    return float(difference / torch.linalg.vector_norm(exact.double()).clamp_min(1e-30))


def assert_as_exact(got: torch.Tensor, exact: torch.Tensor, factor: float = 2.0, steps: int = 1) -> None:
    """`got` errs at most `factor` times as much as `exact` rounded to got's dtype, plus float32's own error.

    `steps` counts roundings to the dtype on the way (each adds an error of the same size).
    """
    assert got.shape == exact.shape
    rounding = relative_error(exact.to(got.dtype), exact)
    limit = factor * steps * rounding + 2e-6
    error = relative_error(got, exact)
    assert error <= limit, f"relative error {error:.3e}, wanted at most {limit:.3e}"


def assert_replay_equals_eager(launch: Callable[[], None], *outputs: torch.Tensor) -> None:
    """A captured launch gives the same bits as an eager one over the same memory."""
    before = [output.clone() for output in outputs]
    launch()
    eager = [output.clone() for output in outputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for output, content in zip(outputs, before, strict=True):
        output.copy_(content)
    graph.replay()
    torch.cuda.synchronize()
    for output, want in zip(outputs, eager, strict=True):
        assert torch.equal(output, want)
