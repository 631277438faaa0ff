"""Kernels compiled for a card that is not there: shared memory, registers, types, which no interpreter sees."""

import json
from dataclasses import replace

import pytest
import triton

from benchmarks.kernels.attention_variants import Workload
from benchmarks.kernels.compiled_kernels import resident_programs
from benchmarks.kernels.worker_processes import WorkerProcess

MOST_STACK_BYTES = 128 if triton.__version__.startswith("3.6.") else 256
"""Of the kernels that ship: what the attention kernels over 8-bit caches and the choice among sampled ids spill. Their
plans were measured with Triton 3.6; 3.8 spills 200 bytes of the decode kernel over int8, 3.6 at most 120."""

CARD = {"name": "NVIDIA H200", "capability": 90, "multi_processor_count": 132, "shared_memory_per_block_optin": 232_448}
KERNELS = {
    "decode": Workload("decode", (1024,) * 32, "int8"),
    "prefill": Workload("prefill", (1024,) * 16, "fp8"),
}

SCRIPT = """
import json, sys
from benchmarks.kernels.compiled_kernels import resources
from benchmarks.kernels.kernel_report import MODEL, shipped_kernels
from benchmarks.kernels.pretended_gpu import Card
from kernels.compile_ahead import compile_all

needed = shipped_kernels(MODEL, sys.argv[1], Card())
parts = sys.argv[2:]
needed = [kernel for kernel in needed if not parts or any(part in kernel.function.fn.__name__ for part in parts)]
compile_all(needed, 2)
print(json.dumps([resources(kernel) for kernel in needed]))
"""


def ask(compiler, workload, **options):
    return compiler.ask({"do": "compile", "card": CARD, "workload": workload.to_json(), "options": options}, 100)


def check(found):
    for kernel in found:
        assert kernel["shared_bytes"] <= CARD["shared_memory_per_block_optin"], kernel
        assert kernel["stack_bytes"] <= MOST_STACK_BYTES, kernel
        assert kernel["registers"] * kernel["threads"] <= 65_536, kernel
        assert kernel["float8_read_back"] == 0, kernel


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A process that compiles into a fresh folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.delenv("TRITON_INTERPRET", raising=False)
        with WorkerProcess.of_module("benchmarks.kernels.attention_worker") as worker:
            yield worker


def test_attention_over_8_bit_caches_compiles(compiler):
    """The kernel that is nearest to the limits, again and again in one process, and one that does not fit."""

    for workload in KERNELS.values():
        found = ask(compiler, workload)
        assert "failed" not in found, found
        check(found["kernels"])
    (kernel,) = ask(compiler, KERNELS["decode"], specialised=False)["kernels"]
    check([kernel])
    room = resident_programs(kernel, CARD["shared_memory_per_block_optin"])
    assert kernel["threads"] == 64 and room >= 4, "four programs of two warps on a multiprocessor"
    (large,) = ask(compiler, KERNELS["decode"], specialised=False, tile_tokens=256, num_stages=5)["kernels"]
    assert large["shared_bytes"] > CARD["shared_memory_per_block_optin"]
    assert "failed" in ask(compiler, KERNELS["decode"], specialised=False, tile_tokens=100), "no power of two"


@pytest.mark.parametrize(
    ("rows", "key_tile", "stack_bytes"), [(8, 64, 0), pytest.param(2, 128, 64, marks=pytest.mark.slow)]
)
def test_prefill_attention_compiles_with_either_tile_of_keys(rows, key_tile, stack_bytes, compiler):
    """The short one without spills; either with all the registers of its multiprocessor."""
    found = ask(compiler, Workload("prefill", (256,) * rows), specialised=True, key_tile=key_tile)
    assert "failed" not in found, found
    check(found["kernels"])
    (kernel,) = found["kernels"]
    assert (kernel["threads"], kernel["registers"]) == (384, 168) and kernel["stack_bytes"] <= stack_bytes, kernel


@pytest.mark.parametrize(
    ("cache", "tokens", "programs", "stages"),
    [
        ("fp8", 16, 12, 3),
        pytest.param("auto", 32, 4, 3, marks=pytest.mark.slow),
        ("auto", 32, 6, 2),
        pytest.param("int8", 16, 12, 3, marks=pytest.mark.slow),
    ],
)
def test_decode_attention_by_single_warps_compiles(cache, tokens, programs, stages, compiler):
    """With a spill or two at most, and with room for as many programs on a multiprocessor as its plan has."""
    sizes = {
        "num_warps": 1, "max_registers": None, "tile_tokens": tokens, "start_tiles": 2, "num_stages": stages,
    }  # fmt: skip
    found = ask(compiler, replace(KERNELS["decode"], cache=cache), specialised=True, **sizes)
    assert "failed" not in found, found
    (kernel,) = found["kernels"]
    assert kernel["threads"] == 32 and kernel["stack_bytes"] <= 16, kernel
    assert resident_programs(kernel, CARD["shared_memory_per_block_optin"]) >= programs


@pytest.mark.parametrize("cache", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_decode_attention_by_teams_compiles(cache, compiler):
    """Two teams of four warps on a multiprocessor, without spills."""
    sizes = {"num_warps": 4, "max_registers": None, "tile_tokens": 128, "start_tiles": 0}
    found = ask(compiler, replace(KERNELS["decode"], cache=cache), specialised=True, **sizes)
    assert "failed" not in found, found
    (kernel,) = found["kernels"]
    assert (kernel["threads"], kernel["stack_bytes"]) == (128, 0), kernel
    assert resident_programs(kernel, CARD["shared_memory_per_block_optin"]) == 2


@pytest.mark.parametrize("cache", ["auto", "int8", "fp8"])
def test_few_rows_by_single_warps_compile(cache, compiler):
    found = ask(compiler, Workload("few_rows", (512,), cache), single_warps=True)
    assert "failed" not in found, found
    check(found["kernels"])
    (kernel,) = (kernel for kernel in found["kernels"] if "warps" in kernel["name"])
    assert (kernel["threads"], kernel["stack_bytes"]) == (32, 0), kernel


def test_kernels_that_store_float8_compile(run_script):
    """Those that only store, and those that also hand on what reading would give."""
    found = json.loads(run_script(["-c", SCRIPT, "fp8", "norm_rope_store"], timeout=110))
    assert len(found) >= 5
    check(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cache", ["auto", "int8", "fp8"])
def test_every_kernel_of_a_models_steps_compiles(cache, run_script):
    """A minute of two cores for the first, seconds for those of 8-bit caches that differ from it."""
    parts = [] if cache == "auto" else ["attention", "decode", "prefill", "hopper", "store", "gemm"]
    found = json.loads(run_script(["-c", SCRIPT, cache, *parts], timeout=590))
    assert len(found) > 12
    check(found)


WIDEST = """
import itertools, json
import torch
from benchmarks.kernels.compiled_kernels import resources
from benchmarks.kernels.pretended_gpu import CARD, Card, pretended_gpu
from kernels.compile_ahead import compile_all, launches_left_out
from kernels.linear_workspace import Workspace
from kernels.skinny_linear import run_plan
from kernels.tuning import default_plan

widest = {}
for has_norm, outputs, inputs in itertools.product((False, True), (1024, 4096), range(32, 16_384, 32)):
    plan = default_plan(16, outputs, inputs, False, by_warps=True, has_norm=has_norm)
    if plan.kernel == "warps":
        widest[plan.num_warps, plan.block_n, has_norm] = (plan, outputs, inputs)
with pretended_gpu(Card()), torch.inference_mode(), launches_left_out() as needed:
    tensor = lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")
    workspace = Workspace.allocate(16, 8192, 8192, torch.bfloat16, CARD)
    for ((*_, has_norm), (plan, outputs, inputs)), rows in itertools.product(widest.items(), (8, 16)):
        out, gain = tensor(rows, outputs), tensor(inputs) if has_norm else None
        added = None if has_norm else out
        run_plan(plan, tensor(rows, inputs), tensor(outputs, inputs), out, gain, 1e-6, added, False, workspace)
compile_all(needed, 2)
print(json.dumps([resources(kernel) for kernel in needed]))
"""


def test_products_by_rule_fit_into_registers(run_script):
    """Of each number of warps the longest rows of W, with a norm and with a residual: once 184 bytes were spilled."""
    found = json.loads(run_script(["-c", WIDEST], timeout=110))
    assert {kernel["threads"] for kernel in found} == {64, 128, 256, 512}
    check(found)


PROMPTS = """
import json
import torch
from benchmarks.kernels.compiled_kernels import resources
from benchmarks.kernels.pretended_gpu import Card, pretended_gpu
from kernels import gemm_hopper
from kernels.compile_ahead import compile_all, launches_left_out
from kernels.gemm import HeadStore
from kernels.new_token import NewTokens

def tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype, device="cuda")

def launch(tile_n, columns, **options):
    x, weight, out = tensor(512, 1024), tensor(1024, 1024), tensor(512, columns)
    gemm_hopper.launch(x, weight, out, tile_n=tile_n, programs=132, pdl=True, **options)

def launch_heads(tile_n, head_dim):
    caches = [tensor(9, 256 // head_dim, 16, head_dim) for _ in range(2)]
    new = NewTokens(tensor(99, head_dim, dtype=torch.float32), tensor(head_dim), tensor(head_dim))
    places = tensor(512, dtype=torch.int64), tensor(512, dtype=torch.int32)
    launch(tile_n, 512, store=HeadStore(*caches, *places, new))

with pretended_gpu(Card()), torch.inference_mode(), launches_left_out() as needed:
    launch(256, 1024, residual=tensor(512, 1024))
    launch(256, 512, silu_mul=True)
    launch(128, 1024)
    launch_heads(256, 128)
    launch_heads(128, 64)
compile_all(needed, 2)
print(json.dumps([resources(kernel) for kernel in needed]))
"""


PROMPT_PLANS = [(3, 48, 64), (4, 48, 32), (6, 32, 32), (3, 48, 64), (6, 32, 32)]
"""Of the products of `PROMPTS`: stages, KiB of each, KiB that wait to be stored."""


def test_products_of_prompts_fit_into_registers(run_script):
    """Without spills, for all the sums of a row's 256 columns. Shared memory holds tiles and barriers, and nothing for
    heads to be exchanged in."""
    found = json.loads(run_script(["-c", PROMPTS], timeout=110))
    check(found)
    for kernel, (stages, step_kib, staged_kib) in zip(found, PROMPT_PLANS, strict=True):
        assert kernel["stack_bytes"] == 0, kernel
        assert kernel["shared_bytes"] < 1024 * (stages * step_kib + staged_kib + 1), kernel
