"""One way to compute attention, tried: right first, then timed. A trial holds a workload's inputs for all its ways.

    trial = make_trial(workload)
    trial.check(options)             raises WrongResult
    trial.timed([options, ...])      microseconds of each way, one figure a replay

What is checked: the workload's own rows, and as many rows of random lengths with padding among them, made anew for each
trial; what no row owns is NaN, and so are output and workspace before each call. A result is right if its worst token
errs at most twice as much as the worst of the same computation by torch in the query's type, both against float32.

Called by attention_worker.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from random import Random
from typing import Any

import torch

from benchmarks.kernels import harness
from benchmarks.kernels.attention_variants import LIBRARY, Options, Workload
from benchmarks.kernels.bench_prefill_attention import bucket_for, is_specialised, torch_call
from benchmarks.kernels.decode_chain import QWEN3_06B, SMOKE, DecodeChain, few_rows, takes_warps
from benchmarks.kernels.decode_chain import is_specialised as is_decode_specialised
from benchmarks.kernels.paged_inputs import (
    PagedInputs,
    cache_dtype_of,
    device_and_dtype,
    make_poisoned_inputs,
    multiprocessor_count,
)
from benchmarks.kernels.shapes import AttentionShape

ERROR_FACTOR = 2.0
ERROR_FLOOR = 2e-5  # of float32, whose sums are in another order
FUSED_ERROR = 2e-2  # of bfloat16 with the norm, the rotation and the new token's rounding inside
STORE_ERROR = 5e-2  # of an 8-bit vector in which some elements are a level off

Call = Callable[[], Any]


class WrongResult(Exception):
    """A kernel's output is not that of the reference."""


def plan_with(launch_plan: Callable[..., Any], sizes: tuple[int, ...], usual: Options, options: Options) -> Any:
    """The plan of these options: what `launch_plan` takes is given to it, the rest replaces fields of its result."""
    taken = inspect.signature(launch_plan).parameters
    arguments = usual | {name: value for name, value in options.items() if name in taken}
    return replace(
        launch_plan(*sizes, **arguments), **{name: value for name, value in options.items() if name not in taken}
    )


def worst_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of a token [token, head, dim], relative to its length; infinity where there is a NaN."""
    if not bool(torch.isfinite(result).all()):
        return float("inf")
    errors = (result.float() - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2)).clamp_min(1e-30)
    return float(errors.max())


def require(error: float, allowed: float, what: str) -> None:
    """Raise WrongResult above what is allowed."""
    if error > allowed:
        raise WrongResult(f"{what}: relative error {error:.2e}, allowed {allowed:.2e}")


class _PagedTrial(ABC):
    """Decode or prefill attention over paged inputs; subclasses say how it is launched."""

    query_tokens: int
    inner_calls = harness.INNER_CALL_COUNT

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.quantised = workload.cache != "auto"
        sizes = (workload.query_heads, workload.kv_heads, workload.head_dim, workload.block_size, workload.cache)
        self.shape = AttentionShape(len(workload.lengths), self.query_tokens, max(workload.lengths), *sizes)
        self.scale = workload.head_dim**-0.5
        self._workspace: tuple[torch.Tensor, torch.Tensor] | None = None
        self.heads = (workload.query_heads, workload.kv_heads, workload.head_dim)

    @abstractmethod
    def new_tokens(self, length: int) -> int:
        """Of a row with so many tokens."""

    @abstractmethod
    def call(self, options: Options, inputs: PagedInputs) -> tuple[Call, torch.Tensor, torch.Tensor]:
        """A launch, its poisoned output, and the counters that it must leave at zero."""

    @abstractmethod
    def reference(self, inputs: PagedInputs, dtype: torch.dtype) -> torch.Tensor:
        """By torch, in `dtype` throughout."""

    @property
    @abstractmethod
    def moved(self) -> dict[str, int]:
        """What a call must move or compute, as `Report.add` takes it."""

    def workspace(self, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
        """NaN, and zeros: shared by the calls of a graph, as by an engine's layers, and made anew for each way."""
        device = device_and_dtype()[0]
        if self._workspace is None or len(self._workspace[0]) != floats:
            zeros = torch.zeros(counters, dtype=torch.int32, device=device)
            self._workspace = torch.full((floats,), float("nan"), device=device), zeros
        return self._workspace

    def rows(self) -> list[tuple[int, int]]:
        """The workload's: new tokens and context of each."""
        return [(self.new_tokens(length), length) for length in self.workload.lengths]

    def ragged_rows(self, seed: int) -> list[tuple[int, int]]:
        """Rows as the workload's, shorter by chance; of four or more the last is left to be padding."""
        generator = Random(seed)
        lengths = [generator.randint(1, length) for length in self.workload.lengths]
        lengths = lengths[:-1] if len(lengths) >= 4 else lengths
        return [(min(length, generator.randint(1, self.query_tokens)), length) for length in lengths]

    @cached_property
    def inputs(self) -> list[PagedInputs]:
        """Sets of the workload's rows, to be taken in turn: together larger than the level-2 cache."""
        first = make_poisoned_inputs(self.rows(), self.shape)
        size = sum(tensor.nbytes for tensor in (first.query, first.key_cache, first.value_cache))
        copies = harness.copies_to_exceed_l2(size) if harness.has_cuda() else 1
        return [first] + [make_poisoned_inputs(self.rows(), self.shape, seed) for seed in range(1, copies)]

    @cached_property
    def checked(self) -> list[tuple[PagedInputs, torch.Tensor, float]]:
        """Inputs, the exact result, and the error that is allowed."""
        seed = Random().randrange(1 << 31)
        found = []
        for inputs in (make_poisoned_inputs(self.ragged_rows(seed), self.shape, seed), self.inputs[0]):
            exact = self.reference(inputs, torch.float32)
            same = self.reference(inputs, inputs.query.dtype)
            found.append((inputs, exact, ERROR_FACTOR * worst_error(same, exact) + ERROR_FLOOR))
        return found

    def check(self, options: Options) -> None:
        """Raise WrongResult unless both batches come out right."""
        for inputs, exact, allowed in self.checked:
            self._check_output(options, inputs, exact, allowed)

    def _check_output(self, options: Options, inputs: PagedInputs, exact: torch.Tensor, allowed: float) -> None:
        self._workspace = None
        call, output, counters = self.call(options, inputs)
        call()
        require(worst_error(output, exact), allowed, f"contexts {inputs.context_lengths[:4].tolist()} and so on")
        if bool(counters.any()):
            raise WrongResult("the counters were not left at zero")

    def rehearse(self, options: Options) -> None:
        """One launch, for its kernel to be compiled."""
        self.call(options, make_poisoned_inputs(self.rows(), self.shape))[0]()

    def calls(self, options: Options) -> list[Call]:
        """What a graph is made of."""
        return [self.call(options, inputs)[0] for inputs in self.inputs]

    def share(self, run_us: float) -> float:
        """Of a call's time, what is attention's."""
        return run_us

    def timed(self, ways: list[Options], replays: int = harness.REPLAY_COUNT) -> list[list[float]]:
        """Microseconds of each way, one figure a replay, sorted; several ways are replayed in turn."""
        inner = self.inner_calls if harness.has_cuda() else 1
        found = harness.time_in_turn_us([self.calls(options) for options in ways], inner, replays)
        return [[self.share(run_us) for run_us in runs_us] for runs_us in found]


class DecodeTrial(_PagedTrial):
    """kernels/decode_attention.py: one new token a row."""

    query_tokens = 1

    def new_tokens(self, length: int) -> int:
        """One."""
        return 1

    @property
    def moved(self) -> dict[str, int]:
        """Keys, values and scales, once."""
        from kernels.decode_attention import bytes_moved

        dtype = device_and_dtype()[1]
        return {
            "bytes_moved": bytes_moved(
                [*self.workload.lengths], *self.heads, dtype.itemsize, cache_dtype_of(self.shape)
            )
        }

    def call(self, options: Options, inputs: PagedInputs) -> tuple[Call, torch.Tensor, torch.Tensor]:
        """As the engine launches it, the number of decode rows read from the device."""
        from kernels.decode_attention import decode_attention, launch_plan
        from kernels.paged_kv import HeadShape
        from worker_proc.cuda.fused_forward import row_class

        heads = HeadShape(*self.heads, self.workload.block_size)
        usual = {"specialised": is_decode_specialised(heads, self.quantised), "quantised": self.quantised}
        sizes = (row_class(self.shape.batch), *self.heads, multiprocessor_count())
        plan = plan_with(launch_plan, sizes, usual, options)
        output = torch.full_like(inputs.query, float("nan"))
        partials, counters = self.workspace(plan.workspace_floats, plan.counter_count)
        rows = torch.tensor([self.shape.batch], dtype=torch.int32, device=output.device)
        call = partial(
            decode_attention, output, *inputs.decode_inputs, partials, counters, plan, scale=self.scale,
            decode_row_count=rows, **inputs.scales,
        )  # fmt: skip
        return call, output, counters

    def reference(self, inputs: PagedInputs, dtype: torch.dtype) -> torch.Tensor:
        """Row by row."""
        from kernels.decode_attention import decode_attention_reference

        return decode_attention_reference(*inputs.decode_inputs, scale=self.scale, dtype=dtype, **inputs.scales)


class PrefillTrial(_PagedTrial):
    """kernels/prefill_attention.py: all tokens of each row are new."""

    def __init__(self, workload: Workload) -> None:
        self.query_tokens = max(workload.lengths)
        super().__init__(workload)

    def new_tokens(self, length: int) -> int:
        """All."""
        return length

    @property
    def moved(self) -> dict[str, int]:
        """The products' operations."""
        from kernels.prefill_attention import flops

        lengths = [*self.workload.lengths]
        return {"flops": flops(lengths, lengths, self.workload.query_heads, self.workload.head_dim)}

    def call(self, options: Options, inputs: PagedInputs) -> tuple[Call, torch.Tensor, torch.Tensor]:
        """As the engine launches it for a bucket of this size."""
        from kernels.prefill_attention import COUNTER_COUNT, prefill_attention
        from kernels.prefill_plans import launch_plan
        from worker_proc.cuda.fused_forward import row_class

        usual = {"specialised": is_specialised(self.shape), "quantised": self.quantised}
        usual["chunk_rows"] = bucket_for(self.shape).rows
        sizes = (len(inputs.query), row_class(self.shape.batch), *self.heads, multiprocessor_count())
        plan = plan_with(launch_plan, sizes, usual, options)
        output = torch.full_like(inputs.query, float("nan"))
        _, counters = self.workspace(1, COUNTER_COUNT)
        fresh = inputs.fresh() if plan.fresh else None
        call = partial(
            prefill_attention, output, *inputs.prefill_inputs, counters, plan, scale=self.scale, fresh=fresh,
            **inputs.scales,
        )  # fmt: skip
        return call, output, counters

    def calls(self, options: Options) -> list[Call]:
        """What a graph is made of; by torch, on contiguous tensors, for `LIBRARY`."""
        if options == LIBRARY:
            return [torch_call(self.shape) for _ in self.inputs]
        return super().calls(options)

    def reference(self, inputs: PagedInputs, dtype: torch.dtype) -> torch.Tensor:
        """Row by row; at 4,096 tokens and 32 heads some gigabytes."""
        from kernels.prefill_attention import prefill_attention_reference

        return prefill_attention_reference(*inputs.prefill_inputs, scale=self.scale, dtype=dtype, **inputs.scales)


class FewRowsTrial(_PagedTrial):
    """kernels/fused_decode_attention.py: all between two products. Timed in a chain of layers, less the products."""

    query_tokens = 1
    inner_calls = 1

    def new_tokens(self, length: int) -> int:
        """One."""
        return 1

    @property
    def moved(self) -> dict[str, int]:
        """Keys, values and scales, once."""
        return DecodeTrial(self.workload).moved

    def _plan(self, options: Options) -> Any:
        from kernels.fused_decode_attention import launch_plan
        from kernels.paged_kv import HeadShape

        heads = HeadShape(*self.heads, self.workload.block_size)
        usual = {"single_warps": takes_warps(self.shape.batch, heads, self.quantised)}
        return plan_with(launch_plan, (self.shape.batch, *self.heads[1:]), usual, options)

    @cached_property
    def _row(self) -> tuple[torch.Tensor, Any]:
        """The product's result for each row, and what norms and rotates its heads."""
        from kernels.new_token import NewTokens

        device, dtype = device_and_dtype()
        heads, kv_heads, head_dim = self.heads
        qkv = torch.randn(self.shape.batch, (heads + 2 * kv_heads) * head_dim, device=device, dtype=dtype)
        angles = torch.rand(self.shape.context, head_dim // 2, device=device) * 6.28
        weights = [1 + 0.1 * torch.randn(head_dim, device=device).to(dtype) for _ in range(2)]
        return qkv, NewTokens(torch.cat([angles.cos(), angles.sin()], dim=1), *weights)

    def call(self, options: Options, inputs: PagedInputs) -> tuple[Call, torch.Tensor, torch.Tensor]:
        """The kernel alone."""
        from kernels.fused_decode_attention import fused_decode_attention

        plan = self._plan(options)
        qkv, new = self._row
        output = torch.full_like(inputs.query, float("nan"))
        partials, counters = self.workspace(plan.workspace_floats, self.shape.batch * self.shape.kv_heads)
        call = partial(
            fused_decode_attention, output, qkv, *inputs.decode_inputs[1:], partials, counters, plan, new,
            scale=self.scale, key_scales=inputs.key_scales, value_scales=inputs.value_scales,
            next_caches=(inputs.key_cache, inputs.value_cache),
        )  # fmt: skip
        return call, output, counters

    def reference(self, inputs: PagedInputs, dtype: torch.dtype) -> torch.Tensor:
        """In float32, whatever `dtype`; stores the new tokens."""
        from kernels.fused_decode_attention import fused_decode_attention_reference

        qkv, new = self._row
        return fused_decode_attention_reference(
            qkv, *inputs.decode_inputs[1:], new.rope_table, self.shape.query_heads, scale=self.scale,
            q_weight=new.q_weight, k_weight=new.k_weight, eps=new.eps, key_scales=inputs.key_scales,
            value_scales=inputs.value_scales,
        )  # fmt: skip

    @cached_property
    def _stored(self) -> list[tuple[PagedInputs, torch.Tensor, torch.Tensor]]:
        """Inputs as they were, the exact result, and the new tokens' keys and values as the reference stores them."""
        seed = Random().randrange(1 << 31)
        found = []
        for rows in (self.ragged_rows(seed), self.rows()):
            inputs = make_poisoned_inputs(rows, self.shape, seed)
            written = _own_caches(inputs)
            found.append((inputs, self.reference(written, torch.float32), _new_vectors(written)))
        return found

    def check(self, options: Options) -> None:
        """Raise WrongResult unless output and stored tokens of both batches come out right."""
        allowed = FUSED_ERROR if device_and_dtype()[1].itemsize == 2 else ERROR_FLOOR
        for inputs, exact, stored in self._stored:
            written = _own_caches(inputs)
            self._check_output(options, written, exact, allowed)
            require(worst_error(_new_vectors(written), stored), STORE_ERROR, "the new tokens' keys and values")

    @cached_property
    def _chain(self) -> DecodeChain:
        return DecodeChain([*self.workload.lengths], self.workload.cache, QWEN3_06B if harness.has_cuda() else SMOKE)

    @cached_property
    def _products_us(self) -> float:
        replays = harness.REPLAY_COUNT if harness.has_cuda() else 1
        return harness.time_us([lambda: self._chain.run(None)], inner=1, replays=replays)

    def share(self, run_us: float) -> float:
        """A layer's time, less that of its products."""
        return max(run_us - self._products_us, 0.01) / self._chain.shape.layers

    def rehearse(self, options: Options) -> None:
        """One launch; of the plan that ships, the chain's products too."""
        super().rehearse(options)
        if not options:
            self._chain.run(None)

    def calls(self, options: Options) -> list[Call]:
        """All layers once."""
        attend = partial(few_rows, plan=self._plan(options))
        return [lambda: self._chain.run(attend)]


def _own_caches(inputs: PagedInputs) -> PagedInputs:
    """The same with caches and scales that may be written to."""
    names = ("key_cache", "value_cache", "key_scales", "value_scales")
    tensors = {name: getattr(inputs, name) for name in names}
    return replace(inputs, **{name: tensor if tensor is None else tensor.clone() for name, tensor in tensors.items()})


def _new_vectors(inputs: PagedInputs) -> torch.Tensor:
    """The last key and value of each row, float32 [rows + rows, kv_heads, head_dim]."""
    rows = inputs.row_slots >= 0
    last = inputs.context_lengths[rows].long() - 1
    block_size = inputs.key_cache.shape[2]
    blocks = inputs.block_tables[rows].gather(1, (last // block_size)[:, None])[:, 0].long()
    found = []
    for cache, scales in ((inputs.key_cache, inputs.key_scales), (inputs.value_cache, inputs.value_scales)):
        vectors = cache[blocks, :, last % block_size].float()
        found.append(vectors if scales is None else vectors * scales[blocks, :, last % block_size].float()[..., None])
    return torch.cat(found)


TRIALS = {"decode": DecodeTrial, "few_rows": FewRowsTrial, "prefill": PrefillTrial}


def make_trial(workload: Workload) -> _PagedTrial:
    """The trial of a workload's operation; makes nothing on the device yet."""
    return TRIALS[workload.operation](workload)
