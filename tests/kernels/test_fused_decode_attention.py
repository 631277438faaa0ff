"""Both kernels that make and store the new token themselves, against the float32 reference of the operation:
lengths around tiles and splits, padding, poison, norms, 8-bit caches, graphs."""

import pytest
import torch

from kernels.fused_decode_attention import fused_decode_attention, fused_decode_attention_reference, launch_plan
from kernels.kv_format import dequantise, quantise
from kernels.new_token import NewTokens
from tests.kernels.paged_batches import DEVICES, skip_unless_here

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 16
SCALE = 0.2
KERNELS = ["few_rows", "new_token_apart"]
QUANTISED = [torch.int8, torch.float8_e4m3fn]


@pytest.fixture(params=DEVICES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    device, dtype = request.param
    skip_unless_here(device)
    return dtype


class Case:
    """A batch of rows, each with its cached tokens and a new one; length 0 is a padding row.

    NaN wherever nothing was written, scales and the bits of FP8's NaN included; table entries past a row's last block
    point outside the cache; two spare blocks; in 8-bit caches one token of zeros.
    """

    def __init__(
        self, lengths: list[int], dtype: torch.dtype, *, query_heads: int = 4, kv_heads: int = 2, head_dim: int = 64,
        norm: bool = True, cache_dtype: torch.dtype | None = None, max_blocks: int = 16,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(sum(lengths))
        rows = len(lengths)
        self.query_heads, self.head_dim, self.kv_heads = query_heads, head_dim, kv_heads
        counts = [-(-length // BLOCK) for length in lengths]
        order = torch.randperm(sum(counts) + 2, generator=generator).int()
        tables = torch.full((rows, max_blocks), 2**31 - 1, dtype=torch.int32)
        caches = [torch.full((len(order), kv_heads, BLOCK, head_dim), float("nan")) for _ in range(2)]
        used = 0
        for row, length in enumerate(lengths):
            blocks = order[used : used + counts[row]]
            used += counts[row]
            tables[row, : len(blocks)] = blocks
            position = torch.arange(max(length - 1, 0))
            for cache in caches:
                values = torch.randn(len(position), kv_heads, head_dim, generator=generator)
                cache[blocks[position // BLOCK].long(), :, position % BLOCK] = values
        qkv = torch.randn(rows, (query_heads + 2 * kv_heads) * head_dim, generator=generator)
        rope = torch.randn(max_blocks * BLOCK, head_dim, generator=generator)
        weights = [(torch.rand(head_dim, generator=generator) + 0.5).to(DEVICE, dtype) if norm else None] * 2
        for row, length in enumerate(lengths):
            if length == 0:
                qkv[row] = float("nan")
        self.qkv, self.rope = qkv.to(DEVICE, dtype), rope.to(DEVICE)
        self.weights = dict(zip(("q_weight", "k_weight"), weights, strict=True))
        slots = [row if length else -1 for row, length in enumerate(lengths)]
        self.slots, self.lengths, self.tables = (
            torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            tables.to(DEVICE),
        )
        self.caches = [cache.to(DEVICE, dtype) for cache in caches]
        self.scales: list[torch.Tensor | None] = [None, None]
        if cache_dtype is not None:
            self._quantise(cache_dtype)

    def _quantise(self, cache_dtype: torch.dtype) -> None:
        for index, cache in enumerate(self.caches):
            unused = cache.isnan().all(-1)
            for block, position in (~unused[:, 0]).nonzero()[:1].tolist():
                cache[block, :, position] = 0
            stored, scales = quantise(cache.nan_to_num(0.0), cache_dtype)
            stored.view(torch.uint8)[unused] = 0x7F
            self.caches[index], self.scales[index] = stored, scales.masked_fill(unused, float("nan"))

    def copy(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Caches and scales that a call may write to."""
        return [cache.clone() for cache in self.caches], [None if one is None else one.clone() for one in self.scales]

    def reference(self) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
        """Output, caches and scales."""
        caches, scales = self.copy()
        output = fused_decode_attention_reference(
            self.qkv, *caches, self.tables, self.slots, self.lengths, self.rope, self.query_heads, scale=SCALE,
            **self.weights, key_scales=scales[0], value_scales=scales[1],
        )  # fmt: skip
        return output, caches, scales

    def launch(self, kernel: str):
        """A function that calls the kernel; its output, caches, scales and counters. The workspace is poisoned."""
        rows = len(self.slots)
        caches, scales = self.copy()
        output = torch.full((rows, self.query_heads, self.head_dim), float("nan"), device=DEVICE).to(self.qkv.dtype)
        plan = launch_plan(rows, self.kv_heads, self.head_dim, is_apart=kernel == KERNELS[1])
        partials = torch.full((plan.workspace_floats,), float("nan"), device=DEVICE)
        counters = torch.zeros(rows * self.kv_heads, dtype=torch.int32, device=DEVICE)

        new = NewTokens(self.rope, **self.weights)

        def call() -> None:
            fused_decode_attention(
                output, self.qkv, *caches, self.tables, self.slots, self.lengths, partials, counters, plan, new,
                scale=SCALE, key_scales=scales[0], value_scales=scales[1], next_caches=tuple(caches),
            )  # fmt: skip

        return call, output, caches, scales, counters


def check(case: Case, kernel: str) -> None:
    call, output, caches, scales, counters = case.launch(kernel)
    call()
    assert not counters.any(), "the counters are not zero"
    want, want_caches, want_scales = case.reference()
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}[case.qkv.dtype]
    tolerance *= 1 if case.scales[0] is None else 4
    torch.testing.assert_close(output.float(), want, rtol=tolerance, atol=tolerance)
    for cache, wanted, scale, wanted_scale in zip(caches, want_caches, scales, want_scales, strict=True):
        if scale is None:
            torch.testing.assert_close(cache, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
            continue
        torch.testing.assert_close(scale, wanted_scale, rtol=2**-10, atol=0, equal_nan=True)
        written = ~wanted_scale.isnan()
        got, exact = dequantise(cache[written], scale[written]), dequantise(wanted[written], wanted_scale[written])
        step = wanted_scale[written].float().unsqueeze(-1) * (1.01 if cache.dtype == torch.int8 else 32.1)
        assert ((got - exact).abs() <= step).all(), "a stored level is off by more than one"
        assert torch.equal(cache.view(torch.uint8)[~written], wanted.view(torch.uint8)[~written])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lengths", [[1], [2, 64, 65], [66, 129, 200, 0], [16, 17, 255], [0, 0]])
def test_equals_the_reference(lengths, kernel, dtype):
    check(Case(lengths, dtype), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cache_dtype", QUANTISED, ids=["int8", "fp8"])
@pytest.mark.parametrize("lengths", [[1, 0, 17], [65, 200]])
def test_quantised_caches(lengths, cache_dtype, kernel, dtype):
    check(Case(lengths, dtype, cache_dtype=cache_dtype), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [{"query_heads": 2, "kv_heads": 2}, {"query_heads": 5, "kv_heads": 1}])
def test_groups_and_models_without_head_norms(shape, kernel, dtype):
    check(Case([70, 3], dtype, norm=False, **shape), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cache_dtype", [None, *QUANTISED], ids=["plain", "int8", "fp8"])
def test_head_dim_of_128(cache_dtype, kernel, dtype):
    check(Case([130, 31], dtype, head_dim=128, cache_dtype=cache_dtype), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_long_rows_give_a_split_several_tiles(kernel, dtype):
    plan = launch_plan(8, 16, 64)
    assert plan.splits == 2, plan
    check(Case([250, 0, 1, 0, 0, 0, 0, 0], dtype, query_heads=16, kv_heads=16), kernel)


def test_wrong_inputs_are_named():
    case = Case([5], torch.float32)
    case.qkv = case.qkv[:, :128]
    with pytest.raises(ValueError, match=r"qkv: wanted shape \[1, 512\], got \[1, 128\]"):
        case.launch(KERNELS[0])[0]()


def check_one_graph(cache_dtype: torch.dtype | None, kernel: str) -> None:
    """It is right for every mix of lengths. On a GPU."""
    shape = {"query_heads": 16, "kv_heads": 8, "head_dim": 128, "max_blocks": 256, "cache_dtype": cache_dtype}
    room = Case([4096] * 4, torch.bfloat16, **shape)
    call, output, caches, scales, _ = room.launch(kernel)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        call()  # the second finds the cache as the first left it
    for mix in ([1, 4000, 17, 0], [900, 901, 902, 903], [1, 1, 1, 1], [0, 0, 0, 0], [4096, 1, 64, 65]):
        case = Case(mix, torch.bfloat16, **shape)
        for target, source in zip((*caches, *scales), (*case.caches, *case.scales), strict=True):
            if target is not None:
                target.view(torch.uint8)[: len(source)].copy_(source.view(torch.uint8))
        for name in ("qkv", "slots", "lengths", "tables", "rope"):
            getattr(room, name).copy_(getattr(case, name))
        for name, weight in room.weights.items():
            weight.copy_(case.weights[name])
        output.fill_(float("nan"))
        graph.replay()
        want, _, _ = case.reference()
        torch.testing.assert_close(output.float(), want, rtol=2e-2, atol=8e-2 if cache_dtype else 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("cache_dtype", [None, *QUANTISED], ids=["plain", "int8", "fp8"])
def test_one_graph_is_right_for_every_mix_of_lengths(cache_dtype, kernel):
    skip_unless_here("cuda")
    check_one_graph(cache_dtype, kernel)
