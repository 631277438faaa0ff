"""Programs that compile kernels for a GPU that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


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
