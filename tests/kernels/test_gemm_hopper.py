"""Products of prompts' rows and what follows inside them: on a Hopper card, and without one in the emulator."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from kernels import gemm_hopper
from kernels.gemm import HeadStore, gemm_reference, project_heads_reference
from kernels.kv_format import dequantise, read_back
from kernels.launch import HOPPER_SHARED_BYTES, multiprocessor_count
from kernels.linear_workspace import Workspace
from kernels.new_token import NewTokens
from kernels.skinny_linear import run_plan
from kernels.tuning import LinearPlan
from tests.kernels.closeness import DEVICE, assert_as_exact, assert_replay_equals_eager, random_tensor
from tests.kernels.gluon_emulator import KernelAhead, emulate
from tests.kernels.test_qk_norm_rope_store import MAX_POSITION, rope_table

FOLLOWS = ["plain", "residual", "in_place", "silu_mul", "heads", "heads_kept", "heads_without_norm"]
TILES = list(itertools.product(FOLLOWS, (256, 128)))
"""What follows, and the tile's columns."""

RAGGED = ("x_desc", "residual_desc", "out_desc")
"""The tensors whose rows may end inside a tile; W's have to fill theirs."""


@pytest.fixture
def device(hopper_device, monkeypatch):
    """The card, or the CPU with the kernel emulated."""
    if hopper_device == "cpu":
        emulate(monkeypatch, gemm_hopper, "_gemm_kernel", ragged=RAGGED)
    return hopper_device


def in_nan(rows: torch.Tensor) -> torch.Tensor:
    """The same as a view of more and longer rows, in which everything else is NaN."""
    wide = torch.full((rows.shape[0] + 131, rows.shape[1] + 24), float("nan"), dtype=rows.dtype, device=rows.device)
    view = wide[1:-130, 8:-16]
    return view.copy_(rows)


@dataclass(frozen=True)
class Case:
    """Arguments of `gemm_hopper.launch`, and the memory around what it writes: NaN, but for a residual in place."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    tile_n: int
    options: dict
    caches: torch.Tensor
    """[block, key or value, head, position, element]; empty where no heads are stored."""

    def launch(self, programs: int, **plan) -> None:
        options = self.options | plan
        gemm_hopper.launch(self.x, self.weight, self.out, tile_n=self.tile_n, programs=programs, **options)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `out` and `caches` should hold, in float32."""
        caches = self.caches.float()
        store = self.options.get("store")
        if store is None:
            return gemm_reference(self.x, self.weight, **self.options), caches
        wide = replace(store, key_cache=caches[:, 0], value_cache=caches[:, 1])
        head_dim = store.key_cache.shape[3]
        query_heads = (self.weight.shape[0] - 2 * store.columns) // head_dim
        heads = project_heads_reference(self.x, self.weight, query_heads, wide).flatten(1)
        if self.out.shape[1] == heads.shape[1]:
            return heads, caches
        rows = self.x.shape[0]
        kept = caches.new_zeros(2, rows, store.columns // head_dim, 1, head_dim)  # blocks of a token each
        every = torch.arange(rows, device=self.x.device)
        project_heads_reference(
            self.x, self.weight, query_heads, replace(wide, key_cache=kept[0], value_cache=kept[1], slot_mapping=every)
        )
        return torch.cat([heads, *kept.flatten(2)], dim=1), caches


def make_case(
    follows: str, rows: int, columns: int, inputs: int, dtype: torch.dtype, tile_n: int, *, kv_columns: int,
    head_dim: int = 128, block_size: int = 16, seed: int = 0,
) -> Case:  # fmt: skip
    """`follows`: of FOLLOWS. `columns`: W's rows; of a q/k/v product `kv_columns` are k's, and as many v's."""
    x = in_nan(random_tensor(rows, inputs, dtype=dtype, seed=seed + 1))
    weight = in_nan(random_tensor(columns, inputs, dtype=dtype, seed=seed + 2, scale=inputs**-0.5))
    caches, options = torch.empty(0, 2, dtype=dtype, device=DEVICE), {}
    out_columns = columns
    if follows == "silu_mul":
        options, out_columns = {"silu_mul": True}, columns // 2
    elif follows.startswith("heads"):
        out_columns = columns if follows == "heads_kept" else columns - 2 * kv_columns
        caches = empty_caches(rows, kv_columns, head_dim, block_size, dtype)
        options = {"store": make_store(caches, rows, follows != "heads_without_norm", seed)}
    out = in_nan(torch.full((rows, out_columns), float("nan"), dtype=dtype, device=DEVICE))
    if follows in ("residual", "in_place"):
        residual = random_tensor(rows, columns, dtype=dtype, seed=seed + 3)
        options = {"residual": out.copy_(residual) if follows == "in_place" else in_nan(residual)}
    return Case(x, weight, out, tile_n, options, caches)


def empty_caches(rows: int, kv_columns: int, head_dim: int, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Room for more than the rows; a block's keys and values lie one behind the other."""
    shape = (rows // block_size + 3, 2, kv_columns // head_dim, block_size, head_dim)
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def make_store(caches: torch.Tensor, rows: int, has_norm: bool, seed: int) -> HeadStore:
    """Distinct slots in shuffled order, of which every third from the second on is none."""
    blocks, _, _, block_size, head_dim = caches.shape
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(blocks * block_size, generator=generator)[:rows]
    slots[1::3] = -1
    positions = torch.randint(MAX_POSITION, (rows,), generator=generator)
    positions = positions if caches.dtype == torch.float16 else positions.int()
    weights = [random_tensor(head_dim, dtype=caches.dtype, seed=seed + i) if has_norm else None for i in (4, 5)]
    new = NewTokens(rope_table(head_dim), *weights, eps=1e-6)
    return HeadStore(caches[:, 0], caches[:, 1], slots.to(DEVICE), positions.to(DEVICE), new)


def assert_elements(got: torch.Tensor, exact: torch.Tensor) -> None:
    """As a whole as exact as rounding, and no element off by more than two roundings of itself or a usual one."""
    assert torch.equal(got.isnan(), exact.isnan()), "written where nothing should be, or the other way round"
    got, exact = got.nan_to_num(0), exact.nan_to_num(0)
    assert_as_exact(got, exact)
    usual = exact[exact != 0].square().mean().sqrt() if exact.any() else 1.0
    limit = torch.finfo(got.dtype).eps * exact.abs().clamp_min(usual)
    wrong = (got.float() - exact).abs() > limit
    assert not wrong.any(), f"{int(wrong.sum())} wrong elements, the first at {wrong.nonzero()[0].tolist()}"


def check(case: Case, programs: int, **plan) -> None:
    """Launch, compare with float32, and look around the result; the case is used up."""
    want, want_caches = case.exact()
    case.launch(programs, **plan)
    assert_elements(case.out, want)
    for kind in range(2):
        assert_elements(case.caches[:, kind], want_caches[:, kind])
    case.out.fill_(float("nan"))
    assert case.out._base.isnan().all(), "written beside the result"


@dataclass(frozen=True)
class Size:
    """Of a product: rows, tiles of columns, steps of K, and programs that share the tiles."""

    rows: int
    n_tiles: int
    steps: int
    programs: int

    def case(self, follows: str, tile_n: int, dtype: torch.dtype, **heads) -> Case:
        """A third of the tiles are k's, and as many v's."""
        columns, kv_columns = self.n_tiles * tile_n, self.n_tiles // 3 * tile_n
        return make_case(follows, self.rows, columns, 64 * self.steps, dtype, tile_n, kv_columns=kv_columns, **heads)


SIZES = {
    "one-row": Size(1, 3, 1, programs=5),
    "two-row-tiles": Size(200, 3, 2, programs=2),
    "an-empty-half": Size(300, 4, 1, programs=5),  # rows 320-383 lie past the end
    "whole-tiles-many-steps": Size(128, 7, 8, programs=3),  # of up to 6 stages
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize(("follows", "tile_n"), TILES)
def test_matches_float32(follows, tile_n, size, dtype, device):
    check(size.case(follows, tile_n, dtype), size.programs)


@pytest.mark.parametrize("follows", ["heads", "heads_kept", "heads_without_norm"])
@pytest.mark.parametrize(
    ("head_dim", "tile_n", "block_size"),
    [(16, 128, 16), (32, 256, 8), (64, 128, 128), (64, 256, 16), (128, 128, 1), (256, 256, 32)],
)
def test_heads_of_any_size(head_dim, tile_n, block_size, follows, device):
    case = Size(70, 5, 2, programs=3).case(follows, tile_n, torch.bfloat16, head_dim=head_dim, block_size=block_size)
    check(case, programs=3)


@pytest.mark.parametrize(("follows", "tile_n"), [("heads", 256), ("heads", 128), ("heads_kept", 128)])
def test_tokens_without_a_slot_are_not_stored(follows, tile_n, device):
    case = Size(130, 3, 1, programs=4).case(follows, tile_n, torch.bfloat16)
    case.options["store"].slot_mapping.fill_(-1)
    check(case, programs=4)
    assert case.caches.isnan().all()


def quantised_case(case: Case, cache_dtype: torch.dtype, block_size: int) -> Case:
    """The same with 8-bit caches: bytes and scales that nothing has written are 0x7F and NaN."""
    store = case.options["store"]
    _, kv_heads, _, head_dim = store.key_cache.shape
    size = (case.x.shape[0] // block_size + 3, kv_heads, block_size)
    keys, values = (
        torch.full((*size, head_dim), 0x7F, dtype=torch.uint8, device=DEVICE).view(cache_dtype) for _ in range(2)
    )
    scales = [torch.full(size, float("nan"), dtype=torch.float16, device=DEVICE) for _ in range(2)]
    quantised = replace(store, key_cache=keys, value_cache=values, key_scales=scales[0], value_scales=scales[1])
    return replace(case, options={"store": quantised}, caches=torch.empty(0, 2, dtype=case.x.dtype, device=DEVICE))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("follows", ["heads", "heads_kept", "heads_without_norm"])
@pytest.mark.parametrize(
    ("size", "tile_n", "head_dim"),
    [
        (Size(70, 3, 2, 3), 128, 128),
        (Size(200, 3, 1, 2), 256, 128),
        (Size(1, 6, 1, 5), 128, 64),
        (Size(129, 3, 2, 9), 256, 64),
        (Size(40, 3, 1, 2), 128, 16),
    ],
)
def test_heads_for_8_bit_caches(size, tile_n, head_dim, follows, cache_dtype, device):
    """Scales and elements as of float32 but for its rounding; what is kept, to the bit what reading the cache gives."""
    block_size = 8
    case = size.case(follows, tile_n, torch.bfloat16, head_dim=head_dim, block_size=block_size)
    case.x[0] = 0  # vectors of zeros, which have the scale 0
    case = quantised_case(case, cache_dtype, block_size)
    store = case.options["store"]
    names = ("key_cache", "value_cache", "key_scales", "value_scales")
    want = replace(store, **{name: getattr(store, name).clone() for name in names})
    query_heads = (case.weight.shape[0] - 2 * store.columns) // head_dim
    queries = project_heads_reference(case.x, case.weight, query_heads, want).flatten(1)
    case.launch(size.programs)
    assert_elements(case.out[:, : queries.shape[1]], queries)
    stored = store.slot_mapping >= 0
    slots = store.slot_mapping[stored]
    kept = case.out[stored, queries.shape[1] :].view(len(slots), -1, store.columns // head_dim, head_dim)
    for part, kind in enumerate(("key", "value")):
        cache, scales = (getattr(store, f"{kind}_{name}") for name in ("cache", "scales"))
        want_cache, want_scales = (getattr(want, f"{kind}_{name}") for name in ("cache", "scales"))
        written = ~want_scales.isnan()
        assert torch.equal(scales.isnan(), ~written), "stored where nothing should be, or the other way round"
        assert (cache.view(torch.uint8)[~written] == 0x7F).all()
        torch.testing.assert_close(scales[written], want_scales[written], rtol=2**-10, atol=0)
        found, exact = (
            dequantise(each[written], scale[written]) for each, scale in ((cache, scales), (want_cache, want_scales))
        )
        step = want_scales[written].float().unsqueeze(-1) * (1 if cache_dtype == torch.int8 else 32)
        assert ((found - exact).abs() <= step * 1.01).all()
        assert (cache[written].float() != want_cache[written].float()).float().mean() < 0.01
        if follows == "heads_kept":
            block, place = slots // block_size, slots % block_size
            assert torch.equal(kept[:, part], read_back(cache[block, :, place], scales[block, :, place]))


@pytest.mark.parametrize("follows", FOLLOWS)
def test_a_row_of_nan_stays_alone(follows, device):
    case = Size(140, 3, 2, programs=2).case(follows, 128, torch.bfloat16)
    for row in (3, 127, 139):
        case.x[row] = float("nan")
    want, want_caches = case.exact()
    case.launch(2)
    assert_elements(case.out, want)
    assert torch.equal(case.caches.isnan(), want_caches.isnan())


@pytest.mark.parametrize(("stages", "offset"), [(2, 0), (2, 1), (3, 2), (6, 5)])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_fewer_steps_than_one_group_is_behind_the_other(steps, stages, offset, device):
    """With one step and one tile a program the second group waited for a second step for ever."""
    for programs in (3, 1):
        case = Size(129, 3, steps, programs).case("plain", 128, torch.bfloat16)
        check(case, programs, stages=stages, offset=offset)


def check_count(case: Case, programs: int, count: int, **plan) -> None:
    """Launch with a count of tokens, and look at rows below it, at tiles past it and around the result."""
    used, options = min(count, len(case.x)), dict(case.options)
    if "store" in options:
        slots = options["store"].slot_mapping.clone()
        slots[used:] = -1
        options["store"] = replace(options["store"], slot_mapping=slots)
    want, want_caches = replace(case, options=options).exact()
    tiled = min(-(-used // gemm_hopper.TILE_M) * gemm_hopper.TILE_M, len(case.x))
    untouched = case.out[tiled:].clone()
    # Of a plan, where it is not aligned as tensors are.
    counts = torch.tensor([1, 0, count], dtype=torch.int32, device=case.x.device)
    case.launch(programs, token_count=counts[2:], **plan)
    assert_elements(case.out[:used], want[:used])
    assert torch.equal(case.out[tiled:].nan_to_num(7), untouched.nan_to_num(7)), "a tile without tokens is computed"
    for kind in range(2):
        assert_elements(case.caches[:, kind], want_caches[:, kind])
    case.out.fill_(float("nan"))
    assert case.out._base.isnan().all(), "written beside the result"


@pytest.mark.parametrize("programs", [2, 7])
@pytest.mark.parametrize("count", [0, 1, 128, 129, 300, 301, 2**31 - 1])
@pytest.mark.parametrize("follows", FOLLOWS)
def test_rows_past_the_count_of_tokens_cost_nothing(follows, count, programs, device):
    """Whole tiles and parts of them, none at all, more than there are rows; fewer tiles than programs, and more."""
    check_count(Size(300, 3, 2, programs).case(follows, 128, torch.bfloat16), programs, count)


@pytest.mark.parametrize(("group_m", "programs"), [(1, 3), (1, 20), (2, 4), (3, 1), (16, 20)])
def test_tiles_in_bands_of_any_height(group_m, programs, device):
    """Five tiles of rows, which are no multiple of most heights. A program behind a full last band divided by zero."""
    check(Size(570, 3, 1, programs).case("plain", 128, torch.bfloat16), programs, group_m=group_m)


@pytest.mark.skipif(DEVICE == "cuda", reason="the emulator's, which knows what is early")
@pytest.mark.parametrize(("follows", "tile_n"), [each for each in TILES if each[0] != "in_place"])
def test_what_the_kernel_ahead_writes_is_read_after_it(follows, tile_n, monkeypatch):
    """Not in place: what a program wrote there would be undone before the next one."""
    case = Size(130, 3, 2, programs=2).case(follows, tile_n, torch.bfloat16)
    written = [case.x, *(case.options[name] for name in ("residual",) if name in case.options)]
    emulate(monkeypatch, gemm_hopper, "_gemm_kernel", KernelAhead(*written), RAGGED)
    check(case, programs=2, pdl=True)


@pytest.mark.skipif(DEVICE == "cuda", reason="the emulator's, which knows what is early")
@pytest.mark.parametrize("count", [0, 1, 130])
def test_programs_without_a_tile_wait_for_the_kernel_ahead(count, monkeypatch):
    """Who waits for this kernel would not wait for that one otherwise; and the count is read before."""
    case = Size(130, 3, 2, programs=2).case("plain", 128, torch.bfloat16)
    emulate(monkeypatch, gemm_hopper, "_gemm_kernel", KernelAhead(case.x), RAGGED)
    check_count(case, 2, count, pdl=True)


GEMM_PLAN = LinearPlan("gemm", 128, 64, 4, norm_apart=True)
LEFT_TO_THE_LIBRARY = [(name, columns) for name in ("x", "weight", "out", "residual") for columns in (4, 8)]


@pytest.mark.parametrize("misplaced", [None, *LEFT_TO_THE_LIBRARY])
def test_rows_that_the_copy_engine_cannot_copy_are_the_librarys(misplaced, device, monkeypatch):
    """Rows of 8 bytes too many, or from 8 bytes on: for a residual of such rows there was an error."""
    calls, launch = [], gemm_hopper.launch
    monkeypatch.setattr(gemm_hopper, "launch", lambda *a, **o: calls.append(a) or launch(*a, **o))
    case = Size(300, 3, 2, programs=2).case("residual", 128, torch.bfloat16)
    tensors = {"x": case.x, "weight": case.weight, "out": case.out} | case.options
    if misplaced is not None:
        name, columns = misplaced
        rows, width = tensors[name].shape
        wide = tensors[name].new_zeros(rows, width + columns)
        tensors[name] = wide[:, columns // 8 * 4 :][:, :width].copy_(tensors[name])
    x, weight, out, residual = tensors.values()
    workspace = Workspace.allocate(300, 128, 384, torch.bfloat16, torch.device(DEVICE))
    run_plan(GEMM_PLAN, x, weight, out, None, 1e-6, residual, False, workspace)
    assert_as_exact(out, gemm_reference(x, weight, residual=residual), steps=2)
    assert len(calls) == (misplaced is None)


def test_stages_fit_beside_what_is_staged():
    wide, silu_mul = gemm_hopper.PLAIN.value, gemm_hopper.SILU_MUL.value
    for tile_n, follows in itertools.product((256, 128), (wide, silu_mul)):
        stages = gemm_hopper.stage_count(tile_n, follows)
        staged = 128 * tile_n * 2 // (2 if follows == silu_mul else 1)
        barriers = 8 * (2 * stages + 3)
        assert 3 <= stages <= 6 and staged + stages * (128 + tile_n) * 128 + barriers <= HOPPER_SHARED_BYTES


@dataclass(frozen=True)
class Model:
    """Sizes of the products of a model's layer."""

    hidden: int
    heads: int
    kv_heads: int
    inter: int
    has_norm: bool

    def case(self, product: str, rows: int, tile_n: int, seed: int) -> Case:
        """One of the layer's four products, or a plain one."""
        q_columns, kv_columns = self.heads * 128, self.kv_heads * 128
        heads = "heads" if self.has_norm else "heads_without_norm"
        follows, columns, inputs = {
            "qkv_kept": ("heads_kept", q_columns + 2 * kv_columns, self.hidden),
            "qkv": (heads, q_columns + 2 * kv_columns, self.hidden),
            "o": ("in_place", self.hidden, q_columns),
            "gate_up": ("silu_mul", 2 * self.inter, self.hidden),
            "down": ("residual", self.hidden, self.inter),
            "plain": ("plain", q_columns + 2 * kv_columns, self.hidden),
        }[product]
        return make_case(follows, rows, columns, inputs, torch.bfloat16, tile_n, kv_columns=kv_columns, seed=seed)


QWEN3_06B = Model(1024, 16, 8, 3072, has_norm=True)
LLAMA_8B = Model(4096, 32, 8, 14_336, has_norm=False)
on_a_card = pytest.mark.parametrize("hopper_device", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@on_a_card
@pytest.mark.parametrize(
    ("product", "tile_n"),
    list(itertools.product(["qkv", "qkv_kept", "o", "gate_up", "down", "plain"], (256, 128))),
)
@pytest.mark.parametrize(
    ("model", "rows"),
    [(QWEN3_06B, 8000), (QWEN3_06B, 300), (QWEN3_06B, 1), (LLAMA_8B, 500)],
    ids=["qwen-8000", "qwen-300", "qwen-1", "llama-500"],
)
def test_a_models_products(model, rows, product, tile_n, hopper_device):
    """Early behind the copies that make the inputs, and on fresh ones: an error that moves would be a race."""
    for seed in (0, 10):
        case = model.case(product, rows, tile_n, seed)
        check(case, multiprocessor_count(case.x.device), pdl=True)


@on_a_card
@pytest.mark.parametrize("product", ["qkv", "o", "gate_up", "down", "plain"])
@pytest.mark.parametrize("count", [0, 1, 4097, 7424, 8192])
def test_a_models_products_end_with_the_tokens(product, count, hopper_device):
    case = QWEN3_06B.case(product, 8192, 256, seed=0)
    check_count(case, multiprocessor_count(case.x.device), count, pdl=True)


@on_a_card
def test_replay_equals_eager(hopper_device):
    case = QWEN3_06B.case("o", 300, 128, seed=0)
    assert_replay_equals_eager(lambda: case.launch(132), case.out)
