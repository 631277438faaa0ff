"""The small kernels' benchmarks at their smoke size: each case is made and called once."""

import importlib

import pytest

OPERATIONS = [
    "rms_norm",
    "silu_mul",
    "embedding",
    "qk_norm_rope_store",
    "step_inputs",
    "sampling",
    "skinny_linear",
    "fixed_order_linear",
    "pack_blocks",
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("operation", OPERATIONS)
def test_smoke_cases_run(operation):
    module = importlib.import_module(f"benchmarks.kernels.bench_{operation}")
    names = []
    for case in module.cases(smoke=True):
        for calls in (case.calls, case.library_calls):
            made = calls() if callable(calls) else calls
            for call in made:
                call()
        assert case.bytes_moved > 0
        names.append(case.name)
    assert len(set(names)) == len(names) > 0
