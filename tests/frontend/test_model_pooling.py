"""The pooling of a folder that sentence-transformers wrote is taken over; embeddings are told what is not supported."""

import json
import os
from pathlib import Path

import pytest

from common.config import EngineConfig, ModelOptions
from common.errors import RequestError
from common.findings import OK, WARNING
from frontend.engine import Engine
from frontend.model_pooling import ModelPooling
from frontend.preflight import look_at_embeddings

TYPES = "sentence_transformers.models."
FLAGS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def write(folder: Path, *on: str, more: tuple[str, ...] = ("Normalize",)) -> Path:
    """The files of a model whose pooling has these switches on, and which goes on with these modules."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": TYPES + "Transformer"}]
    for kind in ("Pooling", *more):
        path = f"{len(modules)}_{kind}"
        modules.append({"idx": len(modules), "name": str(len(modules)), "path": path, "type": TYPES + kind})
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    flags = {f"pooling_mode_{name}": name in on for name in FLAGS}
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, **flags, "include_prompt": True})
    )
    return folder


@pytest.mark.parametrize(
    ("flag", "mode"),
    [("mean_tokens", "mean"), ("lasttoken", "last"), ("cls_token", "cls"), ("mean_sqrt_len_tokens", "mean")],
)
@pytest.mark.parametrize("more", [(), ("Normalize",)])
def test_modes_that_there_are(flag, mode, more, tmp_path):
    found = ModelPooling.read(write(tmp_path, flag, more=more))
    assert found == ModelPooling(mode, str(tmp_path / "1_Pooling" / "config.json"))
    assert found.name() == mode


@pytest.mark.parametrize(("named", "mode"), [("mean", "mean"), ("lasttoken", "last"), (["cls"], "cls")])
def test_a_mode_by_its_name(named, mode, tmp_path):
    write(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": named, "include_prompt": True}))
    assert ModelPooling.read(tmp_path).mode == mode


def test_an_ordinary_folder_says_nothing(tmp_path, monkeypatch):
    assert ModelPooling.read(tmp_path) == ModelPooling("last")
    monkeypatch.chdir(write(tmp_path, "mean_tokens"))
    assert ModelPooling.read("") == ModelPooling("last"), "no folder is not the one that we are in"


@pytest.mark.parametrize(
    ("flags", "more", "text"),
    [
        (("max_tokens",), (), "asks for the pooling max; supported: mean, mean_sqrt_len, lasttoken, cls"),
        (("weightedmean_tokens",), (), "asks for the pooling weightedmean; supported"),
        (("cls_token", "mean_tokens"), (), "asks for the pooling cls with mean; supported"),
        ((), (), "asks for the pooling none; supported"),
        (("mean_tokens",), ("Dense", "Normalize"), "has a module Dense; supported: Transformer, Pooling, Normalize"),
    ],
)
def test_what_there_is_not_is_refused_when_an_embedding_is_asked_for(flags, more, text, tmp_path):
    found = ModelPooling.read(write(tmp_path, *flags, more=more))
    with pytest.raises(RequestError, match=text) as caught:
        found.name()
    assert (caught.value.code, caught.value.param, caught.value.status) == ("unsupported_pooling", "pooling", 400)


@pytest.mark.parametrize(
    "text",
    [
        "{", "[1]", '[{"type": "a.Pooling"}]', '[{"type": "Pooling", "path": "nowhere"}]', "3", "[" * 100_000,
        '[{"type": "Pooling", "path": ""}]', '[{"type": "Pooling", "path": "x\\u0000"}]',
        '[{"type": "Pooling", "path": "../../../../../etc"}]',
    ],
    ids=lambda text: text[:40].strip(),
)  # fmt: skip
def test_files_that_cannot_be_read_are_named(text, tmp_path):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(RequestError, match="^this model's embeddings cannot be made: .*(modules|config).json"):
        ModelPooling.read(tmp_path).name()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir, lambda path: None])
@pytest.mark.timeout(30)
def test_what_is_no_file_is_not_read(make, tmp_path):
    """A pipe had the frontend wait for ever, a device ended it: neither keeps a model from generating."""
    config = write(tmp_path, "mean_tokens") / "1_Pooling" / "config.json"
    config.unlink()
    make(config)
    with pytest.raises(RequestError, match="cannot read .*config.json: (wanted a file, got|No such file)"):
        ModelPooling.read(tmp_path).name()


@pytest.mark.parametrize("absolute", [False, True])
def test_no_file_outside_of_the_folder_is_read(absolute, tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    write(model, "mean_tokens")
    (other / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    path = str(other) if absolute else "1_Pooling/../../other"
    (model / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": path}]))
    with pytest.raises(RequestError, match="modules.json .*other is outside of the folder"):
        ModelPooling.read(model).name()


@pytest.mark.parametrize("text", ["x" * 500_000, "\x1b[31m\n", "\ud800"], ids=["long", "control", "surrogate"])
def test_names_of_the_folder_fit_an_answer(text, tmp_path):
    module = {"type": "a.Pooling", "path": "1_Pooling"}
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": text}))
    for modules in ([module], [{"type": f"a.{text}"}]):
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(RequestError, match="supported: ") as caught:
            ModelPooling.read(tmp_path).name()
        assert len(str(caught.value)) < 600 and str(caught.value).isascii() and str(caught.value).isprintable()


def engine(byte_tokenizer, folder: Path, **model) -> Engine:
    return Engine(EngineConfig(model=ModelOptions(**model), model_dir=str(folder)), byte_tokenizer, lambda _: None)


def test_a_request_and_the_option_go_before_the_folder(byte_tokenizer, tmp_path):
    write(tmp_path, "mean_tokens")
    plain = engine(byte_tokenizer, tmp_path)
    assert [plain.check_pooling(asked) for asked in (None, "", "cls", "last")] == ["mean", "mean", "cls", "last"]
    assert engine(byte_tokenizer, tmp_path, pooling="last").check_pooling(None) == "last"


def test_a_folder_that_asks_for_too_much_serves_all_the_rest(byte_tokenizer, tmp_path):
    plain = engine(byte_tokenizer, write(tmp_path, "max_tokens"))
    with pytest.raises(RequestError, match="this model's embeddings cannot be made: .* asks for the pooling max"):
        plain.check_pooling(None)
    assert plain.check_pooling("mean") == "mean"


def test_the_preflight_says_how_embeddings_would_be_made(tmp_path):
    config = EngineConfig()
    [entry] = look_at_embeddings(config, str(write(tmp_path, "lasttoken"))).entries
    assert (entry.status, entry.text) == (OK, f"pooling last, as {tmp_path / '1_Pooling' / 'config.json'} says")
    [entry] = look_at_embeddings(config, str(write(tmp_path, "max_tokens"))).entries
    assert entry.status == WARNING and "asks for the pooling max" in entry.text
    [entry] = look_at_embeddings(EngineConfig(model=ModelOptions(pooling="cls")), str(tmp_path)).entries
    assert (entry.status, entry.text) == (OK, "pooling cls, as --pooling says")
