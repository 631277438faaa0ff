"""The HTTP socket is had at once or refused with advice."""

import os
import socket
import stat

import pytest

from common.config import ServerOptions
from common.errors import ConfigError
from common.http_socket import (
    HTTP_SOCKET_VARIABLE,
    bind_http,
    file_identity,
    http_url,
    inherited_http_socket,
    remove_own,
)


def test_a_free_port_is_known_before_anyone_serves():
    with bind_http(ServerOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        assert http_url(ServerOptions(port=0), listener) == f"http://127.0.0.1:{port}"


def test_a_port_whose_engine_still_starts_is_refused():
    """Two sockets that only bind can both have a port: two engines said that they were ready on it."""
    with bind_http(ServerOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match="is in use"):
            bind_http(ServerOptions(port=port))


def test_a_port_in_use_is_refused_with_advice():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} on 127.0.0.1 is in use: choose another, or --port 0"):
            bind_http(ServerOptions(port=port))


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot serve HTTP on 192\.0\.2\.1"):
        bind_http(ServerOptions(host="192.0.2.1", port=0))


def test_unix_socket_is_private_and_replaces_a_stale_one(tmp_path):
    path = tmp_path / "http.sock"
    bind_http(ServerOptions(uds=str(path))).close()
    with bind_http(ServerOptions(uds=str(path))) as listener:
        assert listener.fileno() >= 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(ConfigError, match="http.sock is in use, or is another kind of file: choose another path"):
            bind_http(ServerOptions(uds=str(path)))


def test_another_engines_unix_socket_is_left_alone(tmp_path):
    path = tmp_path / "http.sock"
    options = ServerOptions(uds=str(path))
    with bind_http(options):
        own = file_identity(str(path))
        path.rename(tmp_path / "away.sock")
        with bind_http(options):
            remove_own(str(path), own)
            assert path.is_socket()
            remove_own(str(path), file_identity(str(path)))
            assert not path.exists()
    remove_own("", file_identity(""))


def test_the_inherited_socket_is_the_bound_one(monkeypatch):
    with bind_http(ServerOptions(port=0)) as listener:
        monkeypatch.setenv(HTTP_SOCKET_VARIABLE, str(os.dup(listener.fileno())))
        inherited = inherited_http_socket()
        assert inherited is not None
        with inherited:
            assert inherited.getsockname() == listener.getsockname()
    monkeypatch.delenv(HTTP_SOCKET_VARIABLE)
    assert inherited_http_socket() is None
