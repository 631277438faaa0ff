"""Kernels compiled ahead, by processes, for a GPU that is not there."""

import json
import queue
from types import SimpleNamespace

import pytest
from triton.backends.compiler import GPUTarget

from kernels import compile_ahead

SCRIPT = """
import json, sys, time
import torch
from kernels import compile_ahead
from kernels.rms_norm import rms_norm
from kernels.silu_mul import silu_mul
from benchmarks.kernels.pretended_gpu import pretend_gpu

pretend_gpu(90)
rows = lambda width: torch.zeros(64, width, dtype=torch.bfloat16)
with compile_ahead.launches_left_out() as needed:
    for _ in range(2):
        rms_norm(rows(1024), rows(1024)[0], 1e-6, rows(1024))
        silu_mul(rows(2048), rows(1024))
    rms_norm(rows(512), rows(512)[0], 1e-6, rows(512))
started = []
whole = compile_ahead._compile_elsewhere
compile_ahead._compile_elsewhere = lambda jobs, processes: (started.append(len(jobs)), whole(jobs, processes))
for on_disk_s in (0.0, 60.0):
    compile_ahead.ON_DISK_S = on_disk_s
    for kernel in needed:
        kernel.function.device_caches.clear()
    compile_ahead.compile_all(needed, 2)
ready = [len(kernel.function.device_caches[0][0]) for kernel in needed]
print(json.dumps({"needed": [k.function.fn.__name__ for k in needed], "started": started, "ready": ready}))
"""


def test_what_launches_need_is_compiled_by_processes_once(run_script):
    found = json.loads(run_script(["-c", SCRIPT]))
    assert found["needed"] == ["_rms_norm_kernel", "_silu_mul_kernel", "_rms_norm_kernel"]
    assert found["started"] == [1], "processes are started once a kernel takes long, and only then"
    assert found["ready"] == [2, 1, 2]


def test_a_process_answers_for_what_it_cannot_compile(run_script):
    job = ["kernels.rms_norm", "_rms_norm_kernel", "{}", ["cuda", 90, 32]]
    assert run_script(["-m", "kernels.compile_ahead"], json.dumps(job) + "\n") == "failed: KeyError"


@pytest.mark.parametrize("program", ["read job; exec 0<&-; echo compiled", "read job; exit 1", None])
def test_a_lost_process_leaves_its_kernels_to_their_first_use(program, tmp_path, monkeypatch, caplog):
    """It dies between two kernels, at one, or cannot be started: what is left is compiled where it is needed."""
    stand_in = tmp_path / "stand-in"
    if program is not None:
        stand_in.write_text(f"#!/bin/sh\n{program}\n")
        stand_in.chmod(0o700)
    monkeypatch.setattr(compile_ahead, "sys", SimpleNamespace(executable=str(stand_in)))
    jobs = queue.SimpleQueue()
    for _ in range(3):
        jobs.put(compile_ahead.NeededKernel(SimpleNamespace(fn=json.dumps), "{}"))
    compile_ahead._feed(jobs, GPUTarget("cuda", 90, 32))
    given = {"read job; exec 0<&-; echo compiled": 2, "read job; exit 1": 1, None: 0}[program]
    assert jobs.qsize() == 3 - given
    assert ("lost" in caplog.text) == (given != 1)
