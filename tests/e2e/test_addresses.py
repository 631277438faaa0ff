"""Addresses: two engines never serve at one, and those that other machines reach need keys."""

import os
import subprocess
import sys

import pytest

from common.errors import AccessError, ConfigError
from frontend import Client
from tests.support.ports import reserved_port
from tests.support.server import ROOT, START_TIMEOUT_S, Server


def refusal(server: Server) -> str:
    """The last line of an engine that does not start, and need not be tried again: systemd does so for ever."""
    try:
        assert server.process.wait(START_TIMEOUT_S) == 2, server.stderr()
        return server.stderr().splitlines()[-1]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("option", "address", "told"),
    [
        ("--client-endpoint", "ipc://{}/client.sock", "another engine serves there"),
        ("--uds", "{}/http.sock", "is in use, or is another kind of file"),
    ],
)
def test_a_second_engine_at_an_address_in_use_is_refused(tiny_model_dir, tmp_path, option, address, told):
    address = address.format(tmp_path)
    with Server(tiny_model_dir, option, address) as first:
        line = refusal(Server(tiny_model_dir, option, address))
        assert line.startswith("trireme: ")
        assert address in line
        assert told in line
        with Client(first.ready["client_endpoint"], timeout_s=20) as client:
            assert client.ping() >= 0
        assert (tmp_path / address.rpartition("/")[2]).is_socket()


def test_of_two_engines_that_start_on_one_port_one_is_refused(tiny_model_dir):
    with reserved_port() as port:
        both = [Server(tiny_model_dir, "--port", str(port)) for _ in range(2)]
        try:
            lines = [server.process.stdout.readline() for server in both]
            assert sorted(map(bool, lines)) == [False, True], lines
            loser = both[[bool(line) for line in lines].index(False)]
            assert f"--port {port} on 127.0.0.1 is in use" in loser.stderr()
        finally:
            for server in both:
                server.close()


@pytest.fixture
def port():
    with reserved_port() as number:
        yield number


def launch(*arguments, **variables: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "launch.py", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **variables},
    )  # fmt: skip


def test_other_machines_reach_the_client_socket_with_keys_only(tiny_model_dir, tmp_path, port):
    made = launch("keys", tmp_path, "alice")
    assert made.returncode == 0, made.stderr
    assert f"--client-keys {tmp_path}" in made.stdout
    own = {"server_key": tmp_path / "server.key", "client_keys": tmp_path / "alice.key_secret"}
    options = ("--client-endpoint", f"tcp://0.0.0.0:{port}", "--client-keys", str(tmp_path))
    with Server(tiny_model_dir, *options) as server:
        with Client(f"tcp://127.0.0.1:{port}", timeout_s=20, **own) as client:
            assert client.generate("The sea", {"max_tokens": 2}).completion_tokens == 2
        with pytest.raises(AccessError, match="it wants keys"):
            Client(f"tcp://127.0.0.1:{port}", timeout_s=20)
        assert launch("keys", tmp_path, "--revoke", "alice").returncode == 0
        with pytest.raises(ConfigError, match="alice"):
            Client(f"tcp://127.0.0.1:{port}", **own)
        status = launch("status", XDG_RUNTIME_DIR=str(server.run_dirs))
        assert status.returncode == 0, status.stdout
        assert "serving" in status.stdout, "the user's own commands need no keys"
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--client-endpoint", "tcp://0.0.0.0:5555"], "run `launch.py keys DIR` and add --client-keys DIR"),
        (["--client-endpoint", "tcp://0.0.0.0:5555", "--client-keys", "{}/none"], "run launch.py keys {}/none"),
    ],
)
def test_a_client_socket_for_other_machines_without_keys_is_refused(tiny_model_dir, tmp_path, options, told):
    run = launch("serve", "--model", tiny_model_dir, "--port", "0", *[text.format(tmp_path) for text in options])
    assert run.returncode == 2, run.stderr
    assert told.format(tmp_path) in run.stderr.splitlines()[-1]
