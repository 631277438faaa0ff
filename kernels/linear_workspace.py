"""What the skinny products of a model share: buffers for parts of sums, and the plans that were looked up.

Made by the forward pass, once for a model, and used by kernels/skinny_linear.py.
"""

from dataclasses import dataclass, field

import torch

from kernels.tuning import LinearPlan, find_plan

MAX_ROWS = 256
MAX_SPLITS = 16
COUNTERS = 8192  # one for each output tile of a split product
FEWEST_TILE_ROWS = 16  # what the tensor cores take


@dataclass(frozen=True)
class Workspace:
    """What the products need besides their arguments; one serves all layers, since launches follow one another.

    partials  [float32 elements]   partial sums of products that split K
    counters  [COUNTERS] int32     zero between launches
    normed    [elements]           x after its norm, where that is a launch of its own
    wide      [elements]           gate and up, where the library does the product; its product in parts
    plans                          by operation and rows, once they have been looked up

    `elements` are of the products' dtype.
    """

    partials: torch.Tensor
    counters: torch.Tensor
    normed: torch.Tensor
    wide: torch.Tensor
    plans: dict[tuple[int, ...], LinearPlan] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls, max_rows: int, max_inputs: int, max_outputs: int, dtype: torch.dtype, device: torch.device,
        *, wide_rows: int | None = None,
    ) -> "Workspace":  # fmt: skip
        """Buffers for up to `max_rows` rows, of which at most 256 go through the kernels that split K. `wide_rows`: up
        to how many the library may do a product with SiLU * up, if not all of them."""
        skinny = min(max(max_rows, FEWEST_TILE_ROWS), MAX_ROWS)
        return cls(
            partials=torch.empty(MAX_SPLITS * skinny * min(max_outputs, 2048), dtype=torch.float32, device=device),
            counters=torch.zeros(COUNTERS, dtype=torch.int32, device=device),
            normed=torch.empty(max_rows * max_inputs, dtype=dtype, device=device),
            wide=torch.empty((max_rows if wide_rows is None else wide_rows) * max_outputs, dtype=dtype, device=device),
        )

    def plan_of(self, rows: int, weight: torch.Tensor, *, has_norm: bool = False, silu_mul: bool = False) -> LinearPlan:
        """The plan of an operation with `rows` rows of x and a `weight` [N, K], with a residual or without; looked up
        once."""
        key = plan_key(rows, *weight.shape, has_norm=has_norm, silu_mul=silu_mul)
        plan = self.plans.get(key)
        if plan is None:
            sizes = (weight.device, weight.dtype, rows, *weight.shape)
            plan = self.plans[key] = find_plan(*sizes, silu_mul=silu_mul, has_norm=has_norm)
        return plan

    def rows(self, name: str, row_count: int, columns: int) -> torch.Tensor:
        """The first `row_count` x `columns` elements of a buffer as a matrix; ValueError if it is too small."""
        buffer: torch.Tensor = getattr(self, name)
        if buffer.numel() < row_count * columns:
            raise ValueError(f"workspace.{name}: wanted {row_count} x {columns} elements, got {buffer.numel()}")
        return buffer[: row_count * columns].view(row_count, columns)


def plan_key(
    rows: int, outputs: int, inputs: int, *, has_norm: bool = False, silu_mul: bool = False, in_parts: bool = False
) -> tuple[int, ...]:
    """By what a workspace keeps the plan of a product, or of leaving it in parts, with so many rows of x and a W
    [outputs, inputs]."""
    return (rows, outputs, inputs, has_norm, silu_mul, in_parts)
