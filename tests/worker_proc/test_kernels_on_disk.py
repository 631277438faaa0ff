"""When the process that compiles kernels is started before anything else."""

import os
from dataclasses import asdict, replace

import pytest

from common.config import CacheOptions, EngineConfig, ModelOptions, ServerOptions
from kernels.compile_process import CompileProcess, Job
from worker_proc import kernels_on_disk

pytest.importorskip("triton")
CARD = "NVIDIA H200 9 0 132 232448"


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
    kernels_on_disk.note_kernels(config, CARD)
    assert not starts(config)
    assert not starts(replace(config, session=1, server=ServerOptions(port=9000))), "no kernel depends on these"
    assert starts(replace(config, cache=CacheOptions(kv_cache_dtype="int8")))
    assert starts(replace(config, model_dir="other"))


NAMING_KERNELS = ["kernels/noise.py", "kernels/tuning/skinny_linear.json", "worker_proc/cuda/lanes.py"]


@pytest.mark.parametrize("changed", NAMING_KERNELS)
def test_other_kernels_or_plans_start_it_again(starts, tmp_path, monkeypatch, changed):
    """A table that had been measured again left the note in force, and a pause compiled what it had chosen."""
    root = tmp_path / "engine"
    for name in NAMING_KERNELS:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("before")
    monkeypatch.setattr(kernels_on_disk, "_ROOT", root)
    kernels_on_disk.note_kernels(EngineConfig(), CARD)
    assert not starts(EngineConfig())
    (root / changed).write_text("after")
    assert starts(EngineConfig())


def test_a_worker_without_a_gpu_does_not_start_it(starts, monkeypatch):
    assert not starts(EngineConfig(model=ModelOptions(device="cpu")))
    monkeypatch.setattr(kernels_on_disk, "has_gpu", lambda: False)
    assert not starts(EngineConfig())


def test_a_gpu_does_not_mean_that_triton_is_there(starts, monkeypatch):
    monkeypatch.setattr(kernels_on_disk.importlib.util, "find_spec", lambda _: None)
    assert not starts(EngineConfig())


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"module": "kernels"}]'])
def test_a_note_that_cannot_be_read_is_none(starts, tmp_path, text):
    """Such as one of an engine that was killed while it wrote, or of another version."""
    config = EngineConfig()
    kernels_on_disk.note_kernels(config, CARD)
    (note,) = tmp_path.iterdir()
    note.write_text(text)
    assert starts(config) and kernels_on_disk.kernels_left(config, CARD) is None


def test_the_note_says_what_is_left_until_another_one_takes_its_place(starts):
    config, left = EngineConfig(), [Job("kernels.noise", "kernel", "{}", ("cuda", 90, 32), with_launcher=True)]
    assert kernels_on_disk.kernels_left(config, CARD) is None
    kernels_on_disk.note_kernels(config, CARD, left)
    read = kernels_on_disk.kernels_left(config, CARD)
    assert not starts(config) and [asdict(job) | {"target": tuple(job.target)} for job in read] == [asdict(left[0])]
    kernels_on_disk.note_kernels(config, CARD)
    assert not starts(config) and kernels_on_disk.kernels_left(config, CARD) == []


def test_each_card_has_a_note_of_its_own(starts, tmp_path):
    """In a folder that different cards share, the first one's note stood for the other's kernels, and what these lacked
    was compiled in a pause."""
    config, other, left = EngineConfig(), CARD.replace("132", "114"), [Job("kernels.noise", "kernel", "{}", [], True)]
    kernels_on_disk.note_kernels(config, CARD)
    assert not starts(config), "which card there is nobody knows yet"
    assert kernels_on_disk.kernels_left(config, other) is None
    kernels_on_disk.note_kernels(config, other, left)
    assert [kernels_on_disk.kernels_left(config, card) for card in (CARD, other)] == [[], left]
    for note in tmp_path.iterdir():
        note.write_text("")
        assert starts(config) == all(not each.read_text() for each in tmp_path.iterdir())


def test_the_note_lies_where_triton_keeps_its_kernels(monkeypatch, tmp_path):
    from triton import knobs

    for names in ({}, {"TRITON_HOME": str(tmp_path)}, {"TRITON_CACHE_DIR": str(tmp_path / "there")}):
        for name, value in names.items():
            monkeypatch.setenv(name, value)
        home = knobs.cache_knobs()
        assert str(kernels_on_disk.triton_folder()) == os.environ.get("TRITON_CACHE_DIR", home.get_triton_dir("cache"))


def test_a_folder_that_cannot_be_written_gets_no_note(starts, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    kernels_on_disk.note_kernels(EngineConfig(), CARD)
    assert starts(EngineConfig())


def test_another_kernel_means_another_note(starts, monkeypatch, tmp_path):
    kernels_on_disk.note_kernels(EngineConfig(), CARD)
    (tmp_path / "kernels").mkdir()
    monkeypatch.setattr(kernels_on_disk, "_ROOT", tmp_path)
    assert starts(EngineConfig())


def test_the_note_can_be_read_by_whoever_is_given_the_folder(starts, tmp_path):
    earlier = os.umask(0o022)
    try:
        kernels_on_disk.note_kernels(EngineConfig(), CARD)
    finally:
        os.umask(earlier)
    (note,) = tmp_path.iterdir()
    assert note.stat().st_mode & 0o777 == 0o644
