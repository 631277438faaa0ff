"""What tests of several kernels take: the place to run on, and programs that compile for a GPU that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kernels.paged_batches import DEVICES, skip_unless_here

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=DEVICES)
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """The device and dtype that attention runs on: in the interpreter, or on a GPU."""
    skip_unless_here(request.param[0])
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def hopper_device(request: pytest.FixtureRequest) -> str:
    """Where a kernel for Hopper runs: on such a card, or on "cpu" in the emulator (`gluon_emulator.emulate`)."""
    skip_unless_here(request.param)
    if request.param == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")
    return request.param


@pytest.fixture(params=[None, torch.int8, torch.float8_e4m3fn], ids=["plain", "int8", "fp8"])
def cache(request: pytest.FixtureRequest) -> torch.dtype | None:
    """The element type of a cache, None for the query's."""
    return request.param


@pytest.fixture
def run_script(tmp_path):
    """run(script) -> what it prints last, with kernels compiled for real into a fresh folder."""

    def run(script, stdin=None, timeout=100):
        env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env["CUDA_VISIBLE_DEVICES"] = ""
        env.pop("TRITON_INTERPRET", None)
        command = [sys.executable, *script]
        done = subprocess.run(
            command, check=False, env=env, input=stdin, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    return run
