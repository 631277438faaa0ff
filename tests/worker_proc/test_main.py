"""The worker's entry settles how torch's threads wait, and does so before torch is there to read it."""

import os
import subprocess
import sys

import pytest

from common.config import EngineConfig, ModelOptions
from worker_proc import main, worker


class IdleWorker:
    """Stands in for the worker: starts and ends at once."""

    def __init__(self, config, link, rank, compiler) -> None:
        pass

    def run(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("users_choice", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)]
)
def test_threads_spin_briefly_unless_told_otherwise(users_choice, expected, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # so that what the call sets is undone
        monkeypatch.delenv(name)
    for name, value in users_choice.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "Worker", IdleWorker)
    assert main.main(EngineConfig(), None, 0) == 0
    assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.mark.parametrize(("users_choice", "expected"), [(None, "128"), ("0", "0")])
def test_few_compiled_products_are_kept_unless_told_otherwise(users_choice, expected, monkeypatch):
    name = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    monkeypatch.setenv(name, users_choice or "")
    if users_choice is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(worker, "Worker", IdleWorker)
    assert main.main(EngineConfig(), None, 0) == 0
    assert os.environ[name] == expected


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_what_makes_the_import_of_torch_short_is_begun_before_it_where_there_is_a_gpu(device, monkeypatch):
    begun = []
    for name in ("keep_bytecode", "compile_beside_import", "compile_process", "hash_triton", "import_torch"):
        monkeypatch.setattr(main, name, lambda *_, name=name: begun.append(name))
    monkeypatch.setattr(main, "has_gpu", lambda: True)
    monkeypatch.setattr(main, "wake_gpu", lambda: None)
    monkeypatch.setattr(worker, "Worker", IdleWorker)
    for name in ("GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "CUDA_MODULE_LOADING"):
        monkeypatch.setenv(name, "7")
    assert main.main(EngineConfig(model=ModelOptions(device=device)), None, 0) == 0
    before, behind = ["keep_bytecode", "compile_beside_import"], ["hash_triton", "import_torch"]
    assert begun == (["compile_process"] if device == "cpu" else [*before, "compile_process", *behind])


@pytest.mark.parametrize(
    ("failing", "called"),
    [
        ("", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ("cuInit", ["cuInit"]),
        ("cuDeviceGet", ["cuInit", "cuDeviceGet"]),
        ("libcuda.so.1", []),
    ],
)
def test_the_gpu_is_woken_as_far_as_there_is_one(failing, called, monkeypatch):
    calls = []

    class Driver:
        def __init__(self, name):
            if name == failing:
                raise OSError(f"{name}: cannot open shared object file")

        def __getattr__(self, name):
            return lambda *_: calls.append(name) or int(name == failing)

    monkeypatch.setattr(main.ctypes, "CDLL", Driver)
    main.wake_gpu()
    assert calls == called


@pytest.mark.parametrize("use", ["", "; kernels_on_disk.note_kernels(EngineConfig(), 'a card')"])
def test_torch_is_not_imported_before_that(use, tmp_path):
    """Nor by the look for a note in Triton's folder."""
    code = "import sys, worker_proc.main, common.child; from worker_proc import kernels_on_disk"
    code += f"; from common.config import EngineConfig{use}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
