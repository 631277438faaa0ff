"""The small files of a model's folder: read, or refused in one form, whoever reads them."""

import os
from pathlib import Path

import pytest

from common import model_files
from common.errors import ConfigError
from common.model_files import read_object
from frontend.model_pooling import ModelPooling
from frontend.tokenizer import Tokenizer
from worker_proc.loader.safetensors_checkpoint import SafetensorsCheckpoint
from worker_proc.model_config import read_model_config


def pooling_refusal(folder: Path) -> None:
    """Raises what `ModelPooling.read` keeps for the requests that it concerns."""
    if reason := ModelPooling.read(folder).unsupported:
        raise ConfigError(reason)


READERS = {
    "config.json": read_model_config,
    "model.safetensors.index.json": SafetensorsCheckpoint,
    "modules.json": pooling_refusal,
    "tokenizer_config.json": Tokenizer.load,
    "generation_config.json": Tokenizer.load,
    "chat_template.json": Tokenizer.load,
    "chat_template.jinja": Tokenizer.load,
}
MADE = {
    "a pipe": (os.mkfifo, "wanted a file, got a pipe or a device"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "wanted a file, got a pipe or a device"),
    "a folder": (Path.mkdir, "wanted a file, got a directory"),
    "a loop": (lambda path: path.symlink_to(path.name), "Too many levels of symbolic links"),
    "a large file": (lambda path: path.write_bytes(b" " * 1001), "wanted at most 1,000 bytes, got 1,001"),
    "no text": (lambda path: path.write_bytes(b"\xff"), "'utf-8' codec can't decode byte 0xff"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("make", "reason"), MADE.values(), ids=MADE)
@pytest.mark.parametrize(("name", "read"), READERS.items(), ids=READERS)
def test_every_reader_refuses_what_is_no_small_file(name, read, make, reason, tmp_path, monkeypatch):
    """A pipe had each of them but one wait for ever."""
    monkeypatch.setattr(model_files, "LARGEST_BYTES", 1000)
    make(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"cannot read {tmp_path / name}: {reason}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "wanted JSON: Expecting property name"),
        ("", "wanted JSON: Expecting value"),
        ("[" * 100_000, "wanted JSON: maximum recursion depth"),
        ("9" * 5000, "wanted JSON: Exceeds the limit"),
        ("3", "wanted a JSON (object|array), got int"),
        ("null", "wanted a JSON (object|array), got NoneType"),
    ],
    ids=lambda text: text[:20],
)
@pytest.mark.parametrize(("name", "read"), list(READERS.items())[:-1], ids=list(READERS)[:-1])
def test_every_reader_refuses_what_is_not_its_json(name, read, text, reason, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"cannot read .*/{name}: {reason}"):
        read(tmp_path)


def test_a_file_that_may_be_missing_is_an_empty_object(tmp_path):
    assert read_object(tmp_path / "config.json", missing_ok=True) == {}
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file or directory"):
        read_object(tmp_path / "config.json")
    (tmp_path / "config.json").symlink_to("nowhere")  # as a download leaves them whose files were removed
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: No such file or directory"):
        read_object(tmp_path / "config.json", missing_ok=True)
