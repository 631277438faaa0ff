"""The linear layers of whole models as a chain in one graph, as decoding runs them, against the time of reading W once.

python -m benchmarks.kernels.bench_skinny_linear --output benchmarks/results/skinny_linear.jsonl

`layers`: the four fused products of every layer, each with its own weights; `lm_head`: the last one. The library's
figure is the same chain through its product and this package's norm, activation and residual kernels.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.linear_shapes import MODELS, LinearShape, make_arguments
from benchmarks.kernels.runner import Case, device_and_dtype, run

ROWS = (1, 2, 4, 8, 16, 32, 64)


def chain(shapes: list[LinearShape], rows: int, workspace, by_library: bool) -> Callable[[], None]:
    """One call of all the shapes in order, each on its own weights."""
    from kernels.skinny_linear import run_plan, skinny_linear
    from kernels.tuning import LIBRARY

    device, dtype = device_and_dtype()
    arguments = [make_arguments(shape, rows, dtype, device) for shape in shapes]

    def call() -> None:
        for item, following in zip(arguments, arguments[1:] + arguments[:1], strict=True):
            if by_library:
                run_plan(LIBRARY, workspace=workspace, **item)
            else:
                skinny_linear(workspace=workspace, upcoming=following["weight"], **item)

    return call


def cases(smoke: bool) -> Iterator[Case]:
    from kernels.skinny_linear import Workspace, bytes_moved

    device, dtype = device_and_dtype()
    if smoke:
        groups = {"smoke": [LinearShape("qkv", 32, 16, ("norm",)), LinearShape("o", 16, 32, ("residual",))]}
    else:
        groups = {}
        for model in MODELS.values():
            groups[f"{model.name}_layers"] = list(model.layer) * model.layer_count
            groups[f"{model.name}_lm_head"] = [model.lm_head]
    for name, shapes in groups.items():
        most = max(shape.outputs for shape in shapes)
        workspace = Workspace.allocate(64, max(shape.inputs for shape in shapes), most, dtype, torch.device(device))
        for rows in (1,) if smoke else ROWS:
            moved = sum(bytes_moved(rows, shape.outputs, shape.inputs, dtype.itemsize) for shape in shapes)
            fused, library = (partial(chain, shapes, rows, workspace, by_library) for by_library in (False, True))
            yield Case(f"{name}_m{rows}", moved, lambda f=fused: [f()], lambda f=library: [f()], "cublas", inner=3)


if __name__ == "__main__":
    run(__doc__, "skinny_linear", cases)
