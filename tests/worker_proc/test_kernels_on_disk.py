"""When the process that compiles kernels is started before anything else."""

from dataclasses import replace

import pytest

from common.config import CacheOptions, EngineConfig, ModelOptions, ServerOptions
from kernels.compile_process import CompileProcess
from worker_proc import kernels_on_disk

pytest.importorskip("triton")


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """starts(config) -> whether it is started, on a machine with a GPU and an empty Triton folder."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels_on_disk, "has_gpu", lambda: True)
    started = []
    monkeypatch.setattr(CompileProcess, "start", lambda _: started.append(True))

    def ask(config):
        started.clear()
        kernels_on_disk.compile_process(config)
        return bool(started)

    return ask


def test_a_first_start_starts_it_and_a_later_one_with_the_same_options_does_not(starts):
    config = EngineConfig(model_dir="folder")
    assert starts(config)
    kernels_on_disk.note_kernels(config)
    assert not starts(config)
    assert not starts(replace(config, session=1, server=ServerOptions(port=9000))), "no kernel depends on these"
    assert starts(replace(config, cache=CacheOptions(kv_cache_dtype="int8")))
    assert starts(replace(config, model_dir="other"))


def test_a_worker_without_a_gpu_does_not_start_it(starts, monkeypatch):
    assert not starts(EngineConfig(model=ModelOptions(device="cpu")))
    monkeypatch.setattr(kernels_on_disk, "has_gpu", lambda: False)
    assert not starts(EngineConfig())


@pytest.mark.parametrize("error", [ImportError, PermissionError])
def test_a_worker_that_cannot_look_begins_all_the_same(starts, monkeypatch, error):
    """A GPU does not mean that Triton is there, nor that its folder can be read."""

    def fail(_: EngineConfig) -> None:
        raise error

    monkeypatch.setattr(kernels_on_disk, "_note", fail)
    assert not starts(EngineConfig())


def test_a_folder_that_cannot_be_written_gets_no_note(starts, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    kernels_on_disk.note_kernels(EngineConfig())
    assert starts(EngineConfig())


def test_another_kernel_means_another_note(starts, monkeypatch, tmp_path):
    kernels_on_disk.note_kernels(EngineConfig())
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(kernels_on_disk, "_ROOT", tmp_path)
    assert starts(EngineConfig())
