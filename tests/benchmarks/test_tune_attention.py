"""The sweep over ways to launch attention: what it tries, what it sees, and what it survives."""

import json
import sys

import pytest
import torch

from benchmarks.kernels import (
    attention_trials,
    attention_worker,
    bench_decode_attention,
    decode_chain,
    tune_attention,
)
from benchmarks.kernels.attention_variants import (
    Workload,
    aspects,
    combinations,
    key_of,
    singles,
    smoke_workloads,
    workloads,
)
from benchmarks.kernels.pretended_gpu import Card
from benchmarks.kernels.shapes import AttentionShape
from benchmarks.kernels.tune_attention import Sweep, report, why_not
from benchmarks.kernels.worker_processes import WorkerProcess, ask_all
from kernels.paged_kv import HeadShape

HEADS = {"query_heads": 2, "kv_heads": 1, "head_dim": 64}
DECODE, FEW_ROWS, PREFILL = smoke_workloads()
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the smoke sizes are for the interpreter")


class Here:
    """Answers in this process."""

    def ask(self, request, timeout_s):
        return attention_worker.answer(json.loads(json.dumps(request)))


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_a_sweep_times_each_workload_and_reports_what_fails(tmp_path, capsys):
    sweep = Sweep(smoke_workloads(), Card(), Here(), processes=0, end_s=float("inf"))
    sweep.run(rounds=1, most_choices=1)
    sweep.finals(float("inf"))
    report(sweep.courses, tmp_path / "kept.jsonl")
    decode, few_rows, prefill = sweep.courses
    assert len(few_rows.us) == 2 and len(decode.us) == len(prefill.us) == 1
    for course in (decode, prefill):
        (reason,) = course.failed.values()
        assert "can_specialise" in reason, "the Hopper kernels cannot take float32"
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [line["options"]["way"] for line in kept].count("as it ships") == 3
    table = capsys.readouterr().out.splitlines()
    assert table[-1] == "4 ways timed, 2 left out"
    assert {line.split()[0] for line in table[-4:-1]} == {workload.name for workload in smoke_workloads()}


def spoil_output(launch):
    """One head of one row is wrong by a part in a thousand."""

    def spoiled(output, *args, **options):
        launch(output, *args, **options)
        output[0, 0] *= 1.001

    return spoiled


def leave_out(launch):
    """Nothing is written."""
    return lambda *args, **options: None


@needs_interpreter
@pytest.mark.parametrize(
    "workload, spoil",
    [(DECODE, spoil_output), (DECODE, leave_out), (FEW_ROWS, leave_out), (PREFILL, spoil_output)],
    ids=lambda value: getattr(value, "operation", getattr(value, "__name__", None)),
)
def test_a_wrong_result_is_seen(workload, spoil, monkeypatch):
    module = {"few_rows": "fused_decode_attention"}.get(workload.operation, f"{workload.operation}_attention")
    path = f"kernels.{module}.{module}"
    trial = attention_trials.make_trial(Workload(workload.operation, (20, 5), workload.cache, **HEADS))
    trial.check({})
    monkeypatch.setattr(path, spoil(getattr(sys.modules[f"kernels.{module}"], module)))
    with pytest.raises(attention_trials.WrongResult, match="relative error"):
        trial.check({})


@needs_interpreter
def test_a_token_that_is_not_stored_is_seen(monkeypatch):
    from kernels import fused_decode_attention as fused

    trial = attention_trials.make_trial(Workload("few_rows", (20, 5), "int8", **HEADS))
    whole = fused.fused_decode_attention

    def forgetful(output, qkv, keys, values, *rest, **options):
        scales = {name: options.pop(name).clone() for name in ("key_scales", "value_scales")}
        whole(output, qkv, keys.clone(), values.clone(), *rest, **options, **scales)

    monkeypatch.setattr(fused, "fused_decode_attention", forgetful)
    with pytest.raises(attention_trials.WrongResult, match="new tokens"):
        trial.check({})


def test_what_helped_is_combined_the_most_promising_first():
    choices = {"tile": [{"tile": 32}, {"tile": 128}], "warps": [{"num_warps": 2}], "start": [{"start_tiles": 2}]}
    us = {
        key_of({}): 1.0,
        '{"tile": 32}': 0.9,
        '{"tile": 128}': 1.2,
        '{"num_warps": 2}': 0.8,
        '{"start_tiles": 2}': 1.0,
    }
    found = combinations(choices, us, most=5)
    assert found == [{"num_warps": 2, "tile": 32}], "nothing goes with what did not help, nor a choice with its rival"
    us |= {'{"start_tiles": 2}': 0.99, key_of(found[0]): 0.75}
    assert combinations(choices, us, most=2) == [
        {"num_warps": 2, "tile": 32, "start_tiles": 2},
        {"num_warps": 2, "start_tiles": 2},
    ]
    assert combinations(choices, us | {'{"start_tiles": 2}': float("inf")}, most=2) == [], "it failed"


def test_every_choice_is_of_the_plan_and_differs_from_it():
    """Names are arguments of `launch_plan` or fields of the plan; an unknown one would only fail on the card. One
    choice may be what ships, but not of prompts over 8-bit caches."""
    from kernels import decode_attention, fused_decode_attention, prefill_plans

    makers = {
        "decode": (decode_attention.launch_plan, (64, 16, 8, 128, 132)),
        "few_rows": (fused_decode_attention.launch_plan, (8, 8, 128)),
        "prefill": (prefill_plans.launch_plan, (8192, 64, 16, 8, 128, 132)),
    }
    for workload in workloads():
        launch_plan, sizes = makers[workload.operation]
        usual = {} if workload.operation == "few_rows" else {"quantised": workload.cache != "auto"}
        if workload.operation != "few_rows":
            usual["specialised"] = True
        plans = [attention_trials.plan_with(launch_plan, sizes, usual, {})]
        for options in singles(aspects(workload, hopper=True)):
            plans.append(attention_trials.plan_with(launch_plan, sizes, usual, options))
        different = len(set(plans))
        may_ship = workload.operation != "prefill" or workload.cache == "auto"
        assert different >= len(plans) - may_ship, f"{workload.name} tries a plan twice"


def test_decoding_is_timed_by_the_kernel_that_the_engine_takes(monkeypatch):
    """In every benchmark that launches it, for any type of cache."""
    from kernels import decode_attention, qk_norm_rope_store

    asked, plans = [], []

    def take(*arguments, pdl=False, **_):
        plans.extend((each, pdl) for each in arguments if isinstance(each, decode_attention.DecodePlan))

    monkeypatch.setattr(decode_attention, "can_specialise", lambda *a, **o: asked.append((*a, o["quantised"])) or True)
    monkeypatch.setattr(decode_attention, "decode_attention", take)
    monkeypatch.setattr(qk_norm_rope_store, "qk_norm_rope_store", lambda *_: None)
    for cache in ("auto", "int8"):
        workload = Workload("decode", (20, 5), cache, **HEADS)
        attention_trials.make_trial(workload).rehearse({})
        shape = AttentionShape(2, 1, 20, cache=cache, **HEADS)
        bench_decode_attention.kernel_calls(shape, bench_decode_attention.plan_of(shape))[0]()
        decode_chain.two_launches(decode_chain.DecodeChain([20, 5], cache, decode_chain.SMOKE), 0)
    assert [plan.specialised for plan, _ in plans] == [True] * 6
    assert [plan.num_warps for plan, _ in plans] == [1] * 3 + [4] * 3, "few rows over 8 bits: by teams of warps"
    assert [pdl for _, pdl in plans] == [False, False, True] * 2, "early behind the kernel that stores, as in a step"
    dtype = attention_trials.device_and_dtype()[1]
    assert asked == [(HeadShape(2, 1, 64, 16), dtype, quantised) for quantised in (False, True) for _ in range(3)]


def test_a_kernel_that_has_no_room_is_not_timed():
    kernel = {"name": "_decode_kernel", "registers": 128, "stack_bytes": 88, "shared_bytes": 73_728, "threads": 256}
    assert why_not(kernel, {}, Card()) is None
    assert "room for 2 programs, wanted 3" in why_not(kernel, {"programs_per_multiprocessor": 3}, Card())
    assert "room for 1 programs, wanted 2" in why_not(kernel | {"registers": 136}, {}, Card())
    assert "stack" in why_not(kernel | {"stack_bytes": 700}, {}, Card())
    assert "shared memory" in why_not(kernel | {"shared_bytes": 240_000}, {}, Card())


class Breaking(Here):
    """Answers as a card does that one way takes with it."""

    def __init__(self):
        self.asked = []

    def ask(self, request, timeout_s):
        self.asked.append((request["workload"]["operation"], request["options"]))
        return {"failed": "no answer within 45 s", "lost": True} if request["options"] else {"us": [1.0], "flops": 1}


def test_what_has_lost_a_process_is_not_tried_again():
    lengths = [(512,), (512, 512)]
    rows = [Workload("few_rows", row, "int8") for row in lengths]
    breaking = Breaking()
    sweep = Sweep(rows, Card(), breaking, processes=0, end_s=float("inf"))
    sweep.run(rounds=2, most_choices=1)
    first = singles(aspects(rows[0], hopper=True))[0]
    assert breaking.asked == [("few_rows", {}), ("few_rows", first), ("few_rows", {})]
    assert [list(course.failed.values()) for course in sweep.courses] == [
        ["no answer within 45 s"],
        ["lost a process before"],
    ]


ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
WAYS_TO_BE_LOST = {
    "dies": ("import sys; sys.stdin.readline(); sys.exit(3)", "the process ended with 3"),
    "hangs": ("import sys; sys.stdin.readline(); sys.stdin.read()", "no answer within 0.4 s"),
    "talks": ("print('hello', flush=True)", "no answer but 'hello'"),
    "says so": (
        "import json, sys; print(json.dumps({'failed': 'a fault', 'last': True}), flush=True); sys.stdin.read()",
        "a fault",
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_BE_LOST)
def test_a_lost_process_fails_one_request_and_is_replaced(way, tmp_path):
    """The first process is lost in that way, the next one answers."""
    program, reason = WAYS_TO_BE_LOST[way]
    once = tmp_path / "once"
    script = f"import pathlib\nonce = pathlib.Path({str(once)!r})\nif once.exists():\n"
    script += "".join(f"    {line}\n" for line in ECHO.splitlines())
    script += f"else:\n    once.touch()\n    {program}\n"
    with WorkerProcess([sys.executable, "-c", script]) as worker:
        assert worker.ask({"number": 1}, 0.4 if way == "hangs" else 60)["failed"].startswith(reason)
        once.touch()
        assert worker.ask({"number": 2}, 60) == {"number": 2}


def test_requests_are_answered_in_their_order_by_several_processes():
    requests = [{"number": number} for number in range(9)]
    assert ask_all(lambda: WorkerProcess([sys.executable, "-c", ECHO]), requests, 3, 60) == requests


def test_without_a_gpu_the_whole_sweep_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(tune_attention.harness, "has_cuda", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tune_attention"])
    with pytest.raises(SystemExit):
        tune_attention.main()
    assert "no CUDA GPU here; --smoke" in capsys.readouterr().err
