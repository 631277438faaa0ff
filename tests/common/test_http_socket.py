"""The HTTP socket is had at once or refused with advice."""

import os
import socket
import stat

import pytest

from common.config import ServerOptions
from common.errors import ConfigError
from common.http_socket import HTTP_SOCKET_VARIABLE, bind_http, http_url, inherited_http_socket


def test_a_free_port_is_known_before_anyone_listens():
    with bind_http(ServerOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        assert http_url(ServerOptions(port=0), listener) == f"http://127.0.0.1:{port}"
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0


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
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        listener.listen()
        with pytest.raises(ConfigError, match="Address already in use"):
            bind_http(ServerOptions(uds=str(path)))


def test_the_inherited_socket_is_the_bound_one(monkeypatch):
    with bind_http(ServerOptions(port=0)) as listener:
        monkeypatch.setenv(HTTP_SOCKET_VARIABLE, str(os.dup(listener.fileno())))
        inherited = inherited_http_socket()
        assert inherited is not None
        with inherited:
            assert inherited.getsockname() == listener.getsockname()
    monkeypatch.delenv(HTTP_SOCKET_VARIABLE)
    assert inherited_http_socket() is None
