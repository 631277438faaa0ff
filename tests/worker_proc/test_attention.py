"""The CPU paths and the reference agree with attention written out, for any layout, padding and window."""

from random import Random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.kv_format import dequantise, quantise
from worker_proc.attention import attention, attention_reference, store_reference
from worker_proc.cpu_cache import read_blocks
from worker_proc.fixed_order_attention import fixed_order_attention
from worker_proc.forward_context import ForwardContext

ALL = [attention, attention_reference, fixed_order_attention]
QUANTISED = [torch.int8, torch.float8_e4m3fn]
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 6, 2, 16, 4


class Scene:
    """Rows of given context and query lengths over shuffled blocks; `padding` tokens and one padding row at the end.

    What is not written holds NaN, or the largest number in an int8 cache, whose scales then hold NaN.
    """

    def __init__(
        self, rows: list[tuple[int, int]], padding: int = 0, dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        torch.manual_seed(len(rows))
        self.rows = rows
        width = max(-(-context // BLOCK) for context, _ in rows)
        order = list(range(len(rows) * width))
        Random(3).shuffle(order)
        self.tables = torch.tensor(order, dtype=torch.int32).view(len(rows), width)
        shape = (len(order), KV_HEADS, BLOCK, HEAD_DIM)
        self.key_scales = self.value_scales = None
        if cache_dtype is None:
            self.key_cache, self.value_cache = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
        else:
            self.key_cache, self.value_cache = (
                torch.full(shape, 0x7F, dtype=torch.uint8).view(cache_dtype) for _ in range(2)
            )
            self.key_scales, self.value_scales = (
                torch.full(shape[:3], float("nan"), dtype=torch.float16) for _ in range(2)
            )
        self.keys = [torch.randn(context, KV_HEADS, HEAD_DIM, dtype=dtype) for context, _ in rows]
        self.values = [torch.randn(context, KV_HEADS, HEAD_DIM, dtype=dtype) for context, _ in rows]
        token_count = sum(count for _, count in rows) + padding
        self.query = torch.randn(token_count, HEADS, HEAD_DIM, dtype=dtype)
        self.padding = padding
        for index, (context, count) in enumerate(rows):
            self.write(index, range(context - count))

    def slots(self, index: int, positions: range) -> torch.Tensor:
        positions = torch.tensor(list(positions), dtype=torch.long)
        return self.tables[index, positions // BLOCK].long() * BLOCK + positions % BLOCK

    def write(self, index: int, positions: range) -> None:
        slots = self.slots(index, positions)
        place = (slots // BLOCK, slice(None), slots % BLOCK)
        for cache, scales, vectors in (
            (self.key_cache, self.key_scales, self.keys), (self.value_cache, self.value_scales, self.values)
        ):  # fmt: skip
            if scales is None:
                cache[place] = vectors[index][list(positions)]
            else:
                cache[place], scales[place] = quantise(vectors[index][list(positions)], cache.dtype)

    def context(self) -> ForwardContext:
        starts, slots = [0], []
        for index, (context, count) in enumerate(self.rows):
            slots.append(self.slots(index, range(context - count, context)))
            starts.append(starts[-1] + count)
        row_slots, lengths = list(range(len(self.rows))), [context for context, _ in self.rows]
        if self.padding:
            slots.append(torch.full((self.padding,), -1))
            starts.append(starts[-1] + self.padding)
            row_slots.append(-1)
            lengths.append(0)
        return ForwardContext(
            slot_mapping=torch.cat(slots),
            row_slots=torch.tensor(row_slots, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lengths=torch.tensor(lengths, dtype=torch.int32),
            block_tables=self.tables,
            key_caches=[self.key_cache],
            value_caches=[self.value_cache],
            block_size=BLOCK,
            decode_row_count=sum(count == 1 for _, count in self.rows),
            key_scales=[self.key_scales],
            value_scales=[self.value_scales],
        )

    def new_tokens(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        parts = [tensor[context - count :] for tensor, (context, count) in zip(tensors, self.rows, strict=True)]
        return torch.cat([*parts, torch.full((self.padding, KV_HEADS, HEAD_DIM), float("nan"), dtype=parts[0].dtype)])

    def run(self, function, window: int | None) -> torch.Tensor:
        keys, values = self.new_tokens(self.keys), self.new_tokens(self.values)
        return function(self.query, keys, values, 0, self.context(), scale=0.3, sliding_window=window)

    def kept(self, vectors: list[torch.Tensor]) -> list[torch.Tensor]:
        if self.key_scales is None:
            return vectors
        return [dequantise(*quantise(tensor, self.key_cache.dtype)) for tensor in vectors]

    def expected(self, window: int | None) -> torch.Tensor:
        """Attention written out, token by token, in float32, on K and V as the cache gives them back."""
        outputs, token = [], 0
        kept_keys, kept_values = self.kept(self.keys), self.kept(self.values)
        for index, (context, count) in enumerate(self.rows):
            for position in range(context - count, context):
                first = 0 if window is None else max(0, position + 1 - window)
                keys = kept_keys[index][first : position + 1].float().repeat_interleave(HEADS // KV_HEADS, dim=1)
                values = kept_values[index][first : position + 1].float().repeat_interleave(HEADS // KV_HEADS, dim=1)
                weights = (torch.einsum("hd,khd->hk", self.query[token].float(), keys) * 0.3).softmax(-1)
                outputs.append(torch.einsum("hk,khd->hd", weights, values).flatten())
                token += 1
        return torch.stack(outputs + [torch.zeros(HEADS * HEAD_DIM)] * self.padding)


SCENES = {
    "one token": [(1, 1)],
    "decode, equal lengths": [(9, 1)] * 3,
    "decode, block boundaries": [(3, 1), (4, 1), (5, 1), (8, 1)],
    "decode, very different lengths": [(2, 1), (70, 1), (3, 1), (33, 1)],
    "fresh chunks": [(7, 7), (4, 4)],
    "long fresh chunk": [(150, 150)],
    "continued chunk": [(150, 140)],
    "mixed": [(13, 1), (40, 1), (5, 5), (22, 6), (2, 2)],
}


@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("name", SCENES)
def test_equals_attention_written_out(name, window, function):
    scene = Scene(SCENES[name], padding=3)
    torch.testing.assert_close(scene.run(function, window), scene.expected(window), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("cache_dtype", QUANTISED)
@pytest.mark.parametrize("function", ALL)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", SCENES)
def test_quantised_caches_give_attention_on_what_they_hold(name, window, function, cache_dtype):
    scene = Scene(SCENES[name], padding=3, cache_dtype=cache_dtype)
    torch.testing.assert_close(scene.run(function, window), scene.expected(window), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("cache_dtype", QUANTISED)
@pytest.mark.parametrize("name", ["decode, very different lengths", "long fresh chunk", "continued chunk", "mixed"])
def test_quantised_caches_with_bfloat16(name, cache_dtype, monkeypatch):
    monkeypatch.setattr("worker_proc.cpu_attention.MATMUL_SCORES", 0)
    scene = Scene(SCENES[name], dtype=torch.bfloat16, cache_dtype=cache_dtype)
    torch.testing.assert_close(scene.run(attention, None).float(), scene.expected(None), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("cache_dtype", QUANTISED)
@pytest.mark.parametrize("function", ALL)
def test_quantised_vectors_and_scales_are_stored_where_they_belong_and_nowhere_else(function, cache_dtype):
    scene = Scene(SCENES["mixed"], padding=2, cache_dtype=cache_dtype)
    wanted = Scene(SCENES["mixed"], padding=2, cache_dtype=cache_dtype)
    for index, (context, count) in enumerate(wanted.rows):
        wanted.write(index, range(context - count, context))
    scene.run(function, None)
    for name in ("key_cache", "value_cache", "key_scales", "value_scales"):
        found, right = getattr(scene, name), getattr(wanted, name)
        assert torch.equal(found.view(torch.uint8), right.view(torch.uint8)), name


def test_reading_fp8_is_exact():
    """Every number of e4m3, through the way that the CPU reads it."""
    cache = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 1, 8, 16)
    scales = torch.rand(2, 1, 8).half()
    found = torch.empty(2, 128)
    read_blocks(cache, scales, torch.tensor([0, 1]), out=found)
    wanted = dequantise(cache, scales).view(2, 128)
    is_number = ~wanted.isnan()
    assert is_number.sum() == 254
    assert torch.equal(found[is_number], wanted[is_number])


@pytest.mark.parametrize("name", ["decode, very different lengths", "long fresh chunk", "continued chunk", "mixed"])
def test_bfloat16_with_matrix_products(name, monkeypatch):
    monkeypatch.setattr("worker_proc.cpu_attention.MATMUL_SCORES", 0)
    scene = Scene(SCENES[name], dtype=torch.bfloat16)
    torch.testing.assert_close(scene.run(attention, None).float(), scene.expected(None), atol=0.03, rtol=0.03)


def test_small_groups_give_the_same(monkeypatch):
    monkeypatch.setattr("worker_proc.cpu_plan.GROUP_BYTES", 1)
    scene = Scene(SCENES["decode, equal lengths"])
    torch.testing.assert_close(scene.run(attention, None), scene.expected(None), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("function", ALL)
def test_padding_stores_nothing(function):
    """Fault F1: slot -1 must not be taken as the last slot."""
    scene = Scene([(5, 1)], padding=2)
    last_block = int(scene.tables.max())
    scene.key_cache[last_block, :, BLOCK - 1] = 77.0
    before = scene.key_cache.clone()
    scene.run(function, None)
    written = scene.slots(0, range(4, 5))
    before[written // BLOCK, :, written % BLOCK] = scene.keys[0][4]
    torch.testing.assert_close(scene.key_cache, before, equal_nan=True)


def test_store_of_padding_alone_changes_nothing():
    cache = torch.randn(3, KV_HEADS, BLOCK, HEAD_DIM)
    before = cache.clone()
    store_reference(torch.randn(2, KV_HEADS, HEAD_DIM), cache, torch.tensor([-1, -1]))
    assert torch.equal(cache, before)


class HostReads(TorchDispatchMode):
    """Records operations that read tensor values on the host: on a GPU each of them waits for the device."""

    NAMES = (
        "_local_scalar_dense",
        "nonzero",
        "is_nonzero",
        "equal",
        "masked_select",
        "unique",
        "repeat_interleave.Tensor",
    )

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.NAMES):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cache_dtype", [None, *QUANTISED])
@pytest.mark.parametrize("name", ["decode, very different lengths", "mixed"])
def test_reference_reads_no_device_value(name, cache_dtype):
    """Row P2: the path that runs on a GPU without kernels must be capturable."""
    scene = Scene(SCENES[name], padding=3, cache_dtype=cache_dtype)
    context, keys, values = scene.context(), scene.new_tokens(scene.keys), scene.new_tokens(scene.values)
    with HostReads() as reads:
        attention_reference(scene.query, keys, values, 0, context, scale=0.3, sliding_window=5)
    assert reads.found == []
