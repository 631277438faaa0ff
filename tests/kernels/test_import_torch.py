"""Torch and Triton imported quickly: what is settled before, and what is left as it was."""

import sys

import pytest

from kernels.import_torch import hash_triton

IMPORTED = """
import gc, os
{before}
from kernels.import_torch import hash_triton, import_torch
thread = hash_triton()
import_torch()
import torch
from triton.runtime.cache import triton_key
thread.join()
print(gc.isenabled(), gc.get_freeze_count() > 1000, os.environ["OPENBLAS_NUM_THREADS"], triton_key.cache_info().misses)
"""


@pytest.mark.parametrize(
    ("before", "told"),
    [("", "True True 1 1"), ("gc.disable(); os.environ['OPENBLAS_NUM_THREADS'] = '3'", "False True 3 1")],
)
def test_what_the_caller_had_settled_stays_so(before, told, run_script):
    assert run_script(["-c", IMPORTED.format(before=before)]) == told


def test_triton_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", None)
    assert hash_triton() is None
