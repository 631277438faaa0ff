"""What is told of a model without fetching it."""

import pytest

from common.config import EngineConfig, ModelOptions, ServerOptions
from common.errors import ConfigError
from common.http_socket import bind_http
from launcher.supervisor import bound_http


@pytest.mark.parametrize(
    ("options", "objection"),
    [
        ({"model": "./nosuch"}, "--model ./nosuch: no such folder or .gguf file; and "),
        ({"model": "nosuch.gguf"}, "--model nosuch.gguf: no such folder or .gguf file; and "),
        (
            {"model": "nosuch/folder"},
            "--model nosuch/folder: there is no such folder here, so that it would be fetched",
        ),
        ({"model": "empty"}, "--model empty: no readable config.json in "),
        ({"tokenizer": "./nosuch"}, "--tokenizer ./nosuch: no such folder or .gguf file; and "),
        (
            {"model": "./no", "tokenizer": "no/no"},
            "--model ./no: no such folder or .gguf file; and --tokenizer no/no: ",
        ),
        ({}, ""),
        ({"model": "model", "tokenizer": "empty"}, ""),
    ],
)
def test_an_address_in_use_does_not_hide_what_is_wrong_with_the_model(options, objection, tmp_path, monkeypatch):
    """`launch.py nosuch/folder` beside another engine was told of the port, and of the model only at the next try."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").touch()
    with bind_http(ServerOptions(port=0)) as taken:
        server = ServerOptions(port=taken.getsockname()[1])
        with pytest.raises(ConfigError) as caught:
            bound_http(EngineConfig(model=ModelOptions(**options), server=server))
    address = f"--port {server.port} on 127.0.0.1 is in use: choose another, or --port 0 for any free one"
    assert str(caught.value).startswith(objection + ("" if objection else address))
    assert str(caught.value).endswith(address)
