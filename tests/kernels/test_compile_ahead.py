"""Kernels compiled ahead, by a process of its own, for a GPU that is not there."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from triton.runtime import jit

from benchmarks.kernels.compile_times import all_ready_s
from kernels import compile_ahead, compile_process
from kernels.compile_process import CompileProcess, Job

SCRIPT = """
import json, random, sys
import torch
from kernels import compile_ahead
from kernels.compile_process import CompileProcess
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
found, compiled_here = {}, []
load = compile_ahead.NeededKernel.load
compile_ahead.NeededKernel.load = lambda kernel: load(kernel) or compiled_here.append(kernel.function.fn.__name__)

def make_ready(width, *, starts_early):
    compiled_here.clear()
    for kernel in needed:
        kernel.function.device_caches.clear()
    compiler = CompileProcess(width)
    ahead = compile_ahead.KernelsAhead(compiler)
    if starts_early:
        compiler.start()
        ahead.begin_early(needed[1:])
    ahead.begin(needed)
    started = compiler.started
    ahead.finish()
    compiler.close()
    ready = [len(kernel.function.device_caches[0][0]) for kernel in needed]
    return {"compiled here": list(compiled_here), "started": started, "ready": ready}
"""

ALL_READY = [2, 1, 2]

IN_ANY_ORDER = """
import importlib, json, pkgutil, random
from types import SimpleNamespace
import kernels
from triton import knobs
from triton.runtime.jit import JITFunction
from kernels.compile_ahead import name_alike

name_alike()

modules = [importlib.import_module(f"kernels.{module.name}") for module in pkgutil.iter_modules(kernels.__path__)]
functions = {f.__name__: f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)}
names = []
for seed in range(3):
    order = sorted(functions)
    random.Random(seed).shuffle(order)
    for function in functions.values():
        function.hash, function.used_global_vals = None, {}
    found = {}
    for name in order:
        assert not knobs.runtime.jit_cache_hook(key="", fn=SimpleNamespace(jit_function=functions[name]))
        found[name] = functions[name].cache_key
    names.append(found)
print(json.dumps({"count": len(functions), "differ": [n for n in functions if len({f[n] for f in names}) > 1]}))
"""


def job(function="_rms_norm_kernel", specialization="{}"):
    return Job("kernels.rms_norm", function, specialization, ("cuda", 90, 32), with_launcher=True)


def test_what_launches_need_is_compiled_by_the_process_once(run_script):
    """Started early it compiles all, started when the first kernel is missing the others, and not if none is; the
    largest first, and of the C functions that launch kernels each once."""
    end = """
jobs = compile_ahead._jobs(compile_ahead.largest_first(needed), set())
ways = [make_ready(2, starts_early=early) for early in (False, False, True)]
print(json.dumps([*ways, [(job.name, job.with_launcher) for job in jobs]]))
"""
    missing, on_disk, early, jobs = json.loads(run_script(["-c", SCRIPT + end]))
    assert jobs == [["_rms_norm_kernel", True], ["_rms_norm_kernel", False], ["_silu_mul_kernel", True]]
    assert missing == {"compiled here": ["_silu_mul_kernel"], "started": True, "ready": ALL_READY}
    assert on_disk == {"compiled here": [], "started": False, "ready": ALL_READY}
    assert early == {"compiled here": [], "started": True, "ready": ALL_READY}


def test_what_a_start_does_not_wait_for_is_compiled_behind_it(run_script):
    """And until then is missing on disk, which `from_disk_only` says instead of compiling it."""
    end = """
def is_on_disk(kernel):
    kernel.function.device_caches.clear()
    try:
        with compile_ahead.from_disk_only():
            return kernel.load()
    except compile_ahead.KernelMissing:
        return False
compiler = CompileProcess(2)
ahead = compile_ahead.KernelsAhead(compiler)
ahead.begin_early(needed[:1])
left = ahead.jobs_left(needed)
ahead.finish()
failed = []
behind = compile_ahead.KernelsBehind(compiler, left, failed.append)
try:
    with compile_ahead.from_disk_only():
        for kernel in needed:
            kernel.load()
except compile_ahead.KernelMissing:
    loaded = sum(len(kernel.function.device_caches) for kernel in needed)
before = list(map(is_on_disk, needed))
assert not behind.ready()
behind._thread.join()
assert behind.ready() and not compiler.started
names = [(job.name, job.with_launcher) for job in left]
print(json.dumps([names, loaded, before, list(map(is_on_disk, needed)), failed]))
"""
    names, loaded, before, after, failed = json.loads(run_script(["-c", SCRIPT + end]))
    assert names == [["_rms_norm_kernel", False], ["_silu_mul_kernel", True]], "launchers are built once"
    assert loaded == 0, "what was found before one that is missing is not kept"
    assert before == [True, False, False] and after == [True, True, True] and failed == [[]]


JOBS = [job("first"), job("second")]


@pytest.mark.parametrize(
    ("answers", "failed"),
    [
        ([], None), ([(3, True)], None), ([(3, False)], None),
        ([(3, True), (4, True)], []), ([(4, False), (3, True)], JOBS[1:]), ([(4, False), (3, False)], JOBS),
    ],
)  # fmt: skip
def test_only_what_was_compiled_is_said_to_be_there(answers, failed):
    """A lost process ends the wait too: what is missing is then compiled where it is needed. What had failed, as where
    there was no memory for it, counted as compiled, and no later start tried again."""
    events = []
    compiler = SimpleNamespace(
        order=lambda jobs, is_awaited: events.append((len(jobs), is_awaited)), finished=lambda: iter(answers),
        close=lambda: events.append("close"),
    )  # fmt: skip
    behind = compile_ahead.KernelsBehind(compiler, JOBS, events.append)
    assert events == [], "nothing is begun without being asked for"
    behind.begin()
    behind._thread.join()
    assert behind.ready() and events == [(2, False), *([] if failed is None else [failed]), "close"]


def test_nothing_left_needs_no_process():
    closed = []
    behind = compile_ahead.KernelsBehind(SimpleNamespace(close=lambda: closed.append(True)), [], pytest.fail)
    assert behind.ready() and closed


def test_a_kernel_has_one_name_on_disk_whatever_was_hashed_before_it(run_script):
    """Or what one process has compiled is compiled by the next one again."""
    found = json.loads(run_script(["-c", IN_ANY_ORDER]))
    assert found["count"] > 50 and found["differ"] == []


@pytest.mark.parametrize("wrong", [{"name": "no_such_kernel"}, {"module": "kernels.none"}, {"specialization": "{}"}])
def test_the_process_says_what_it_cannot_compile(run_script, wrong):
    order = [(7, compile_process.asdict(replace(job(), **wrong)))]
    line = run_script(["-m", "kernels.compile_process", "1", ""], json.dumps([True, order]) + "\n")
    assert line == "7 0"


@pytest.mark.parametrize(("end", "is_compiled"), [("os._exit(0)", True), ("os.kill(os.getpid(), 9)", False)])
def test_a_compilation_that_is_killed_is_none(end, is_compiled):
    """As by the system, where there is too little memory."""
    code = f"""
import os
from kernels import compile_process as process
process._compile = lambda job: {end}
print(list(process._compile_all([None] * 3, width=2, parent=os.getppid())))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(json.loads(done.stdout.replace("(", "[").replace(")", "]").lower())) == [
        [number, is_compiled] for number in range(3)
    ]


def test_modules_that_need_a_newer_triton_are_left_out(monkeypatch):
    """It ended when it imported the first one, and the worker compiled one kernel after another."""
    imported = []

    def import_module(name):
        imported.append(name)
        if "warps" in name:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(compile_process.importlib, "import_module", import_module)
    monkeypatch.setattr(compile_process, "gc", SimpleNamespace(disable=lambda: None))
    monkeypatch.setattr(compile_process, "import_torch", lambda: None)
    compile_process._import_kernels()
    assert {"kernels.attention_parts", "kernels.skinny_linear_warps", "kernels.truncation"} <= set(imported)


def test_the_function_that_launches_is_built_by_another_process_meanwhile(run_script, tmp_path):
    """What it is made of is known by then: of kernels that take descriptors, how those look."""
    end = """
import os
from pathlib import Path
from kernels import compile_process
built, process = Path(sys.argv[1], "built"), os.getpid()
def build_launcher(source, metadata):
    built.write_text(json.dumps([os.getpid() == process, source.name, metadata.tensordesc_meta]))
compile_ahead.build_launcher = build_launcher
compile_process._build_launcher_beside(needed[0].function)
kernel = needed[0].function.preload(needed[0].specialization)
print(json.dumps([len(kernel.asm["cubin"]) > 0, json.loads(built.read_text())]))
"""
    assert json.loads(run_script(["-c", SCRIPT + end, str(tmp_path)])) == [True, [False, "_rms_norm_kernel", []]]


def test_the_process_gives_up_without_its_parent():
    assert list(compile_process._compile_all([job()], width=1, parent=-1)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a kernel is compiled to its end")
def test_what_it_has_forked_ends_with_it():
    """An engine that was killed left its compilers to work on for half a minute."""
    code = """
import os, signal
from kernels import compile_process as process
process._compile = lambda job: (os.write(1, b"forked"), signal.pause())
next(process._compile_all([None], width=1, parent=os.getppid()))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.read(6) == b"forked"
        process.kill()
        assert process.stdout.read() == b"", "nobody holds it any more"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise MemoryError"])
def test_an_order_that_is_lost_ends_the_answers(end):
    """Its process was killed, as where there is too little memory, and the worker waited for its kernels for ever."""
    code = f"""
import os, signal
from kernels import compile_process as process
def lost(jobs, width, parent):
    yield 0, True
    {end}
process._import_kernels, process._compile_all = lambda: None, lost
process.main()
"""
    command = [sys.executable, "-c", code, "1", ""]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        order = [(number, compile_process.asdict(job())) for number in range(2)]
        process.stdin.write(json.dumps([True, order]) + "\n")
        process.stdin.flush()
        assert process.stdout.read() == "0 1\n"
        assert process.wait() == 1


@pytest.mark.parametrize(
    ("program", "answered"),
    [
        ("read jobs; echo 1 1", [(1, True)]),
        ("read jobs; echo 1 0", [(1, False)]),
        ("read jobs; exit 1", []),
        ("exec 0<&-; echo 0 1", [(0, True)]),
        (None, []),
    ],
)
def test_a_lost_process_leaves_its_kernels_to_their_first_use(program, answered, tmp_path, monkeypatch, caplog):
    """It dies between two kernels or at one, does not read, or cannot be started: the caller does the rest."""
    stand_in = tmp_path / "stand-in"
    if program is not None:
        stand_in.write_text(f"#!/bin/sh\n{program}\n")
        stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    compiler = CompileProcess(1)
    compiler.order([job(specialization="x" * 100_000)] * 2)
    assert list(compiler.finished()) == answered
    assert compiler.started == (program is not None)
    compiler.close()
    assert not compiler.started
    assert "was lost" in caplog.text or "could be started" in caplog.text


@pytest.mark.parametrize(("named", "meant"), [("cache", "cache"), ("", "."), ("./a/../b", "b")])
def test_a_folder_named_from_here_is_the_same_for_the_process(named, meant, tmp_path, monkeypatch):
    """It is started in another one: what it compiled for the folder `cache` nobody found."""
    stand_in = tmp_path / "stand-in"
    stand_in.write_text('#!/bin/sh\necho "$TRITON_CACHE_DIR" "$TRITON_HOME" > "$TOLD"\n')
    stand_in.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    monkeypatch.chdir(tmp_path)
    for name, value in {"TRITON_CACHE_DIR": named, "TRITON_HOME": "../home", "TOLD": tmp_path / "told"}.items():
        monkeypatch.setenv(name, str(value))
    compiler = CompileProcess(1)
    compiler.order([job()])
    assert list(compiler.finished()) == []
    compiler.close()
    assert (tmp_path / "told").read_text().split() == [str(tmp_path / meant), str(tmp_path.parent / "home")]


@pytest.mark.slow
def test_compile_times_are_told_for_a_card_that_is_not_there(run_script):
    line = run_script(["-m", "benchmarks.kernels.compile_times", "--only", "silu_mul", "--cores", "1", "3"])
    assert line.startswith("   3 cores after 0.") and line.endswith(" s")


def test_side_by_side_each_core_takes_the_next_job():
    assert all_ready_s([4.0, 1.0, 1.0, 1.0, 1.0], cores=2) == 4.0
    assert all_ready_s([1.0, 1.0, 1.0, 1.0, 4.0], cores=2) == 6.0


def test_it_needs_no_class_that_the_oldest_triton_lacks(monkeypatch):
    monkeypatch.delattr(jit, "JITCallable", raising=False)
    spec = importlib.util.find_spec("kernels.compile_ahead")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module._CALLED is jit.JITFunction


DECODING = """
import json
from collections import Counter
import torch
from benchmarks.kernels.pretended_gpu import Card, pretended_gpu
from kernels.compile_ahead import launches_left_out
from kernels.decode_attention import decode_attention, launch_plan
from kernels.launch import takes_gluon

def attend(rows, counts, quantised, specialised):
    numbers = torch.zeros(64, 4, dtype=torch.int32, device="cuda")
    query = torch.zeros(rows, 16, 128, dtype=torch.bfloat16, device="cuda")
    cache = torch.zeros(9, 8, 16, 128, dtype=torch.int8 if quantised else torch.bfloat16, device="cuda")
    scales = torch.zeros(9, 8, 16, dtype=torch.float16, device="cuda") if quantised else None
    plan = launch_plan(64, 16, 8, 128, 132, quantised=quantised, specialised=specialised)
    partials = torch.zeros(plan.workspace_floats, device="cuda")
    counters = torch.zeros(512, dtype=torch.int32, device="cuda")
    decode_attention(
        query, query, cache, cache, numbers, numbers.view(-1)[:rows], numbers.view(-1)[:rows], partials, counters, plan,
        scale=1.0, decode_row_count=counts, key_scales=scales, value_scales=scales,
    )

kernels = ((False, False), (False, True), (True, True)) if takes_gluon(9) else ((False, False),)
with pretended_gpu(Card()), launches_left_out() as needed:
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    for rows in (1, 16, 20):
        for count in (counts[:1], counts[1:]):
            for kernel in kernels:
                attend(rows, count, *kernel)
print(json.dumps([len(kernels), Counter(kernel.function.fn.__name__ for kernel in needed)]))
"""


def test_decode_attention_is_compiled_once_for_all_rows_and_for_all_places_of_their_number(run_script):
    """The rows in which a prompt's step ends are counted elsewhere than those of a step that decodes."""
    kernels, found = json.loads(run_script(["-c", DECODING]))
    assert len(found) == kernels and set(found.values()) == {1}, found
