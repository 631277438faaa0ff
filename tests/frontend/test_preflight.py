"""What the frontend's part of `check` finds: keys, sockets, TLS files and tokenizers, in the words of a start."""

import json
import os
from pathlib import Path

import pytest
import zmq

from common.config import EngineConfig, ModelOptions, ServerOptions
from common.errors import ConfigError
from common.findings import OK, PROBLEM, WARNING, Findings
from common.http_socket import file_identity
from common.keys import make_client_keys, make_server_keys
from common.sockets import bind_client_router, is_served, new_context
from frontend.http.tls import check_tls
from frontend.preflight import look_at_doors, look_at_texts
from frontend.tokenizer import Tokenizer
from tests.support import tiny, tls


def doors(**server) -> Findings:
    return look_at_doors(EngineConfig(server=ServerOptions(**server)))


def texts(folder: Path, **model) -> Findings:
    return look_at_texts(EngineConfig(model=ModelOptions(**model)), str(folder))


def text_of(found: Findings, what: str, status: str) -> str:
    [entry] = [entry for entry in found.entries if entry.what == what]
    assert entry.status == status, entry
    return entry.text


@pytest.fixture
def keys(tmp_path) -> Path:
    make_server_keys(tmp_path / "keys")
    make_client_keys(tmp_path / "keys", "alice")
    return tmp_path / "keys"


KEYED = {"client_endpoint": "tcp://127.0.0.1:5999"}


def test_keys_that_can_be_used(keys):
    found = doors(client_keys=str(keys), **KEYED)
    assert text_of(found, "keys", OK) == f"the engine's own, and those of 1 client; {keys}"


def test_keys_that_starting_would_refuse(keys, tmp_path):
    (keys / "clients" / "bob.key").write_text("no key")
    assert "bob.key holds no key" in text_of(doors(client_keys=str(keys), **KEYED), "keys", PROBLEM)
    (keys / "server.key_secret").chmod(0o644)
    assert "can be read by others: chmod 600" in text_of(doors(client_keys=str(keys), **KEYED), "keys", PROBLEM)
    nowhere = str(tmp_path / "nowhere")
    assert "no server.key_secret there" in text_of(doors(client_keys=nowhere, **KEYED), "keys", PROBLEM)


def test_a_client_socket_in_use_is_left_to_whoever_has_it(tmp_path):
    path = tmp_path / "c.sock"
    context = new_context()
    socket: zmq.Socket = bind_client_router(context, f"ipc://{path}")
    before = file_identity(str(path))
    text = text_of(doors(client_endpoint=f"ipc://{path}"), "client socket", PROBLEM)
    assert text == f"cannot bind ipc://{path}: another engine serves there"
    assert file_identity(str(path)) == before and is_served(f"ipc://{path}")
    socket.close()
    context.term()


def test_a_free_client_socket_is_free_again(tmp_path):
    path = tmp_path / "c.sock"
    assert text_of(doors(client_endpoint=f"ipc://{path}"), "client socket", OK) == f"ipc://{path} is free"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (tls.KEY, ""),
        (tls.KEY_WITH_PASSPHRASE, "--ssl-keyfile has a passphrase, and nobody is there to type it"),
        (tls.CERTIFICATE, "no certificate with its key in PEM"),
        ("nothing", "no certificate with its key in PEM"),
    ],
)
def test_tls_files(key, text, tmp_path):
    certificate, key_file = tls.write(tmp_path, key)
    found = doors(ssl_certfile=certificate, ssl_keyfile=key_file)
    assert text in text_of(found, "TLS", PROBLEM if text else OK)


def test_tls_files_that_are_not_there_are_named_before_the_server_starts(tmp_path):
    certificate, key_file = tls.write(tmp_path)
    os.unlink(key_file)
    with pytest.raises(ConfigError, match="--ssl-keyfile: cannot read .*key.pem: No such file or directory"):
        check_tls(ServerOptions(ssl_certfile=certificate, ssl_keyfile=key_file))


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny.save_tokenizer(tmp_path)
    return tmp_path


def test_a_tokenizer_that_can_be_used(folder):
    found = texts(folder)
    assert text_of(found, "tokenizer", OK).endswith("tokens; an output ends with <|end|>")
    assert text_of(found, "chat template", OK) == "renders a chat"
    assert text_of(found, "sampling", OK) == "no defaults of the model's"


def test_no_tokenizer(tmp_path):
    found = texts(tmp_path)
    with pytest.raises(ConfigError) as caught:
        Tokenizer.load(tmp_path)
    assert text_of(found, "tokenizer", PROBLEM) == str(caught.value)
    assert len(found.entries) == 1


def test_chat_templates(folder):
    file = folder / "own.jinja"
    file.write_text("{{ raise_exception('not today') }}")
    assert "not today" in text_of(texts(folder, chat_template=str(file)), "chat template", WARNING)
    file.write_bytes(b"\xff\xfe")
    assert "cannot read --chat-template" in text_of(texts(folder, chat_template=str(file)), "tokenizer", PROBLEM)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "chats are refused" in text_of(texts(folder), "chat template", WARNING)


def test_files_that_starting_does_not_expect_are_a_problem_too(folder):
    (folder / "tokenizer_config.json").write_text('{"chat_template": [{"title": "no name"}]}')
    assert text_of(texts(folder), "tokenizer", PROBLEM) == "KeyError: 'name'"


def test_sampling_defaults_that_no_request_may_have(folder):
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 7}')
    assert "start with --generation-config vllm to ignore it" in text_of(texts(folder), "sampling", PROBLEM)
    assert text_of(texts(folder, generation_config="vllm"), "sampling", OK) == "no defaults of the model's"
