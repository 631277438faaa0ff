"""What systemd is told, and that nobody is hurt where nobody listens."""

import socket

import pytest

from launcher.service_manager import READY, tell_service_manager


@pytest.mark.parametrize("kind", ["file", "abstract"])
def test_a_change_is_one_datagram(tmp_path, monkeypatch, kind):
    name = str(tmp_path / "s") if kind == "file" else f"\0{tmp_path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        tell_service_manager(READY, status="ready")
        tell_service_manager(status="so so")
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1\nSTATUS=ready", b"STATUS=so so"]


@pytest.mark.parametrize("address", [None, "", "vsock:2:1234", "/there/is/none", "@there-is-none", "/" + "a" * 200])
def test_a_manager_that_cannot_be_reached_is_passed_over(monkeypatch, address):
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    tell_service_manager(READY, status="ready")


def test_a_manager_that_does_not_read_holds_nobody_up(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "s"))
        monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
        for _ in range(2000):
            tell_service_manager(READY, status="again")
