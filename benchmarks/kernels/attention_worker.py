"""A process that compiles or tries ways to compute attention, one after the other, for tune_attention.

Requests and answers are JSON, a line each:

    {"do": "compile", "card": {...}, "workload": {...}, "options": {...}}    -> {"kernels": [{"registers": ...}, ...]}
    {"do": "time", "workload": {...}, "options": {...}}                      -> {"us": [...]}
    {"do": "race", "workload": {...}, "ways": [{...}, ...]}                  -> {"us": [[...], ...]}

or {"failed": "why"}. It compiles without touching the GPU, and keeps the inputs of the last workload. A fault of the
GPU ends the process, since nothing more can be had of it; whoever asked starts another.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

from benchmarks.kernels import harness
from benchmarks.kernels.attention_variants import Workload
from kernels import interpreter

REASON_CHARACTERS = 160
REPLAYS = 12


def compiled(card: dict[str, Any], workload: Workload, options: dict[str, Any]) -> dict[str, Any]:
    """Compile what the way launches; the resources of each kernel."""
    from benchmarks.kernels.attention_trials import make_trial
    from benchmarks.kernels.compiled_kernels import resources
    from benchmarks.kernels.pretended_gpu import Card, pretended_gpu
    from kernels.compile_ahead import launches_left_out

    with pretended_gpu(Card(**card)), launches_left_out() as needed:
        make_trial(workload).rehearse(options)
    found = [resources(kernel) for kernel in needed]
    for kernel in needed:
        kernel.function.device_caches.clear()  # one that is ready would be launched next time
    return {"kernels": found}


@functools.lru_cache(maxsize=1)
def _trial(workload: Workload) -> Any:
    if not harness.has_cuda():
        interpreter.enable()
    from benchmarks.kernels.attention_trials import make_trial

    return make_trial(workload)


def timed(workload: Workload, options: dict[str, Any]) -> dict[str, Any]:
    """Check the way, then time it."""
    trial = _trial(workload)
    trial.check(options)
    return {"us": trial.timed([options], REPLAYS if harness.has_cuda() else 1)[0], **trial.moved}


def raced(workload: Workload, ways: list[dict[str, Any]]) -> dict[str, Any]:
    """Time the ways in turn."""
    return {"us": _trial(workload).timed(ways, harness.REPLAY_COUNT if harness.has_cuda() else 1)}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a request asks for; a failure is an answer too."""
    try:
        workload = Workload.from_json(request["workload"])
        if request["do"] == "compile":
            return compiled(request["card"], workload, request["options"])
        if request["do"] == "time":
            return timed(workload, request["options"])
        return raced(workload, request["ways"])
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return {"failed": f"{type(error).__name__}: {reason}"[:REASON_CHARACTERS], "last": _is_fault(error)}


def _is_fault(error: Exception) -> bool:
    """Whether the GPU refuses all further work."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    torch.cuda.empty_cache()
    return False


def main() -> None:
    """Answer each line of the input until it ends or the GPU fails. What is printed meanwhile goes to the errors."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        found = answer(json.loads(line))
        print(json.dumps(found), file=answers, flush=True)
        if found.get("last"):
            return


if __name__ == "__main__":
    main()
