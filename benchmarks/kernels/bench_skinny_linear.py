"""The linear layers of whole models as a chain in one graph, as decoding runs them, against the time of reading W once.

python -m benchmarks.kernels.bench_skinny_linear --output benchmarks/results/skinny_linear.jsonl

`layers`: the four fused products of every layer, each with its own weights; `lm_head`: the last one. `layers_in_parts`:
the products that leave parts, with the kernels that read them, rope and K/V store included. The library's figure is the
same chain through its product and this package's norm, activation and residual kernels.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.kernels.linear_shapes import MODELS, LinearShape, make_arguments, make_reader
from benchmarks.kernels.runner import Case, device_and_dtype, run

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FEWEST_IN_PARTS = 16


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


def chain_in_parts(shapes: list[LinearShape], rows: int, workspace, by_library: bool) -> Callable[[], None]:
    """The same with products that leave parts and their readers; by the library, the parts are its one product."""
    from kernels.skinny_linear import linear_parts, run_parts_plan, run_plan, skinny_linear
    from kernels.tuning import LIBRARY

    device, dtype = device_and_dtype()
    arguments = [make_arguments(shape, rows, dtype, device) for shape in shapes]
    readers = [make_reader(shape, rows, dtype, device) if "parts" in shape.fusion else None for shape in shapes]

    def call() -> None:
        for item, reader in zip(arguments, readers, strict=True):
            if reader is not None and by_library:
                reader(run_parts_plan(LIBRARY, item["x"], item["weight"], workspace))
            elif reader is not None:
                reader(linear_parts(item["x"], item["weight"], workspace))
            elif by_library:
                run_plan(LIBRARY, workspace=workspace, **item)
            else:
                skinny_linear(workspace=workspace, **item)

    return call


def cases(smoke: bool) -> Iterator[Case]:
    """The chain of a model's layers, and its output projection, at every measured number of rows."""
    from kernels.linear_workspace import MAX_ROWS, Workspace
    from kernels.skinny_linear import bytes_moved

    device, dtype = device_and_dtype()
    if smoke:
        groups = {
            "smoke": [LinearShape("qkv", 32, 16, ("norm",)), LinearShape("o", 16, 32, ("residual",))],
            "smoke_in_parts": [
                LinearShape("qkv", 256, 16, ("parts", "rope")),
                LinearShape("o", 16, 32, ("parts", "add_norm")),
            ],
        }
    else:
        groups = {}
        for model in MODELS.values():
            groups[f"{model.name}_layers"] = list(model.layer) * model.layer_count
            groups[f"{model.name}_lm_head"] = [model.lm_head]
            groups[f"{model.name}_layers_in_parts"] = list(model.in_parts) * model.layer_count
    for name, shapes in groups.items():
        most = max(shape.outputs for shape in shapes)
        workspace = Workspace.allocate(
            MAX_ROWS, max(shape.inputs for shape in shapes), most, dtype, torch.device(device)
        )
        in_parts = name.endswith("in_parts")
        for rows in (1,) if smoke else [rows for rows in ROWS if rows >= FEWEST_IN_PARTS or not in_parts]:
            moved = sum(bytes_moved(rows, shape.outputs, shape.inputs, dtype.itemsize) for shape in shapes)
            fused, library = (
                partial(chain_in_parts if in_parts else chain, shapes, rows, workspace, by_library)
                for by_library in (False, True)
            )
            yield Case(f"{name}_m{rows}", moved, lambda f=fused: [f()], lambda f=library: [f()], "cublas", inner=3)


if __name__ == "__main__":
    run(__doc__, "skinny_linear", cases)
