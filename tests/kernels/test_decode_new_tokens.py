"""Decode attention that makes the new tokens itself, against the reference: on a Hopper card, or in the emulator."""

import pytest
import torch

from kernels import decode_attention_hopper
from kernels.decode_attention import launch_plan
from kernels.decode_new_tokens import decode_new_tokens
from kernels.new_token import NewTokens
from tests.kernels import test_fused_decode_attention as fused
from tests.kernels.gluon_emulator import EmulatedKernel
from tests.kernels.paged_batches import skip_unless_here

DEVICE = fused.DEVICE
CACHES = pytest.mark.parametrize("cache", [None, torch.int8, torch.float8_e4m3fn], ids=["plain", "int8", "fp8"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_here(request.param)
    if request.param == "cpu":
        emulated = EmulatedKernel(decode_attention_hopper._hopper_decode_kernel)
        monkeypatch.setattr(decode_attention_hopper, "_hopper_decode_kernel", emulated)
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")


class Case(fused.Case):
    """Launched by `decode_new_tokens`, the product as it is or in float32 parts."""

    def __init__(
        self, lengths: list[int], cache: torch.dtype | None = None, *, parts: int = 0, programs: int = 0, **shape
    ) -> None:
        super().__init__(lengths, torch.bfloat16, cache_dtype=cache, **shape)
        self.parts, self.programs = parts, programs or (2 if DEVICE == "cpu" else None)

    def launch(self, kernel: str):
        rows = len(self.slots)
        caches, scales = self.copy()
        shape = (rows, self.query_heads, self.kv_heads, self.head_dim, 132 if DEVICE == "cuda" else 4)
        plan = launch_plan(
            *shape, quantised=scales[0] is not None, specialised=True, programs_per_multiprocessor=self.programs
        )
        output = torch.full((rows, self.query_heads, self.head_dim), float("nan"), device=DEVICE).to(torch.bfloat16)
        partials = torch.full((plan.workspace_floats,), float("nan"), device=DEVICE)
        counters = torch.zeros(plan.counter_count, dtype=torch.int32, device=DEVICE)
        new = NewTokens(self.rope, **self.weights)
        qkv = self.qkv
        if self.parts:
            shares = torch.randn(self.parts - 1, *qkv.shape, device=DEVICE)
            qkv = torch.cat([shares, (qkv.float() - shares.sum(0))[None]])

        def call() -> None:
            decode_new_tokens(
                output, qkv, *caches, self.tables, self.slots, self.lengths, partials, counters, plan, new,
                scale=fused.SCALE, key_scales=scales[0], value_scales=scales[1],
            )  # fmt: skip

        return call, output, caches, scales, counters


def check(case: Case) -> None:
    fused.check_results(case, *case.launch(""))


@CACHES
@pytest.mark.parametrize("lengths", [[1], [1, 1, 2, 1], [33, 32, 34], [66, 129, 200, 0], [16, 17, 255], [0, 0]])
def test_equals_the_reference(lengths, cache):
    check(Case(lengths, cache))


@CACHES
@pytest.mark.parametrize("programs", [1, 7])
def test_pieces_of_any_size(programs, cache):
    check(Case([1, 250, 3, 1, 0, 97, 33], cache, programs=programs))


@CACHES
@pytest.mark.parametrize("parts", [1, 3])
def test_products_in_parts(parts, cache):
    check(Case([70, 1, 129], cache, parts=parts, head_dim=128))


@pytest.mark.parametrize(
    "shape",
    [
        {"query_heads": 2, "kv_heads": 2},
        {"query_heads": 5, "kv_heads": 1, "norm": False},
        {"query_heads": 8, "kv_heads": 1, "head_dim": 128},
        {"query_heads": 8, "kv_heads": 2, "head_dim": 128},
    ],
)
@CACHES
def test_head_shapes(shape, cache):
    check(Case([130, 1, 31], cache, **shape))


@CACHES
def test_many_parts_are_merged(cache):
    check(Case([1000], cache, head_dim=128, kv_heads=1, query_heads=2, max_blocks=64, programs=16))


@CACHES
@pytest.mark.gpu
def test_one_graph_is_right_for_every_mix_of_lengths(cache, monkeypatch):
    skip_unless_here("cuda")
    monkeypatch.setattr(fused, "Case", lambda lengths, dtype, cache_dtype, **shape: Case(lengths, cache_dtype, **shape))
    fused.check_one_graph(cache, "")


def test_what_it_cannot_take_is_refused():
    case = Case([5, 6])
    case.rope = case.rope[:, :32].contiguous()
    with pytest.raises(ValueError, match="rope_table"):
        case.launch("")[0]()
