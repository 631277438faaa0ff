"""Kernels compiled ahead, by processes, for a GPU that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys, time
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from kernels import compile_ahead
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul

class Pretended(compile_ahead._NoDevice):
    get_current_stream = staticmethod(lambda device: 0)

driver.set_active(Pretended(GPUTarget("cuda", 90, 32)))
rows = lambda width: torch.zeros(64, width, dtype=torch.bfloat16)
with compile_ahead.launches_left_out() as needed:
    for _ in range(2):
        rms_norm(rows(1024), rows(1024)[0], 1e-6, rows(1024))
        silu_mul(rows(2048), rows(1024))
    rms_norm(rows(512), rows(512)[0], 1e-6, rows(512))
started = []
whole = compile_ahead._compile_elsewhere
compile_ahead._compile_elsewhere = lambda jobs, processes: (started.append(len(jobs)), whole(jobs, processes))
for attempt in range(2):
    for kernel in needed:
        kernel.function.device_caches.clear()
    compile_ahead.compile_all(needed, 2)
ready = [len(kernel.function.device_caches[0][0]) for kernel in needed]
print(json.dumps({"needed": [k.function.fn.__name__ for k in needed], "started": started, "ready": ready}))
"""


@pytest.fixture
def run_script(tmp_path):
    """run(script) -> what it prints last, with kernels compiled for real into a fresh folder."""

    def run(script, stdin=None):
        env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env.pop("TRITON_INTERPRET", None)
        command = [sys.executable, *script]
        done = subprocess.run(command, check=False, env=env, input=stdin, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    return run


def test_what_launches_need_is_compiled_by_processes_once(run_script):
    found = json.loads(run_script(["-c", SCRIPT]))
    assert found["needed"] == ["_rms_norm_kernel", "_silu_mul_kernel", "_rms_norm_kernel"]
    assert found["started"] == [1], "processes are started for what is not on disk, and only then"
    assert found["ready"] == [2, 1, 2]


def test_a_process_answers_for_what_it_cannot_compile(run_script):
    job = ["kernels.rms_norm", "_rms_norm_kernel", "{}", ["cuda", 90, 32]]
    assert run_script(["-m", "kernels.compile_ahead"], json.dumps(job) + "\n") == "failed: KeyError"
