"""What systemd is told, and that nobody is hurt where nobody listens."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from launcher.service_manager import READY, tell_service_manager


@contextlib.contextmanager
def listening(name: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name)
        manager.setblocking(False)
        yield manager


def heard_by(manager: socket.socket) -> list[bytes]:
    """All that has come; a datagram is there as soon as it was sent."""
    datagrams = []
    with contextlib.suppress(BlockingIOError):
        while True:
            datagrams.append(manager.recv(100))
    return datagrams


def fill(name: str) -> None:
    """Send until there is no room for more."""
    with contextlib.suppress(BlockingIOError):
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(b"", name)


@pytest.mark.parametrize("kind", ["file", "abstract"])
def test_a_change_is_one_datagram(tmp_path, monkeypatch, kind):
    name = str(tmp_path / "s") if kind == "file" else f"\0{tmp_path}"
    monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
    with listening(name) as manager:
        tell_service_manager(READY, status="ready")
        tell_service_manager(status="so so")
        assert heard_by(manager) == [b"READY=1\nSTATUS=ready", b"STATUS=so so"]


@pytest.mark.parametrize("address", [None, "", "vsock:2:1234", "/there/is/none", "@there-is-none", "/" + "a" * 200])
def test_a_manager_that_cannot_be_reached_is_passed_over(tmp_path, monkeypatch, address):
    """What it is told is lost, without an error; one that can be reached hears what comes after that."""
    monkeypatch.setenv("NOTIFY_SOCKET", address or "")
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET")
    with listening(str(tmp_path / "s")) as manager:
        tell_service_manager(READY, status="ready")
        monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
        tell_service_manager(status="so so")
        assert heard_by(manager) == [b"STATUS=so so"]


def test_what_is_no_address_of_a_unix_socket_is_no_file_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOTIFY_SOCKET", "vsock:2:1234")
    with listening("vsock:2:1234") as stranger:
        tell_service_manager(READY, status="ready")
        assert not heard_by(stranger)


def test_a_manager_that_does_not_read_holds_nobody_up(tmp_path, monkeypatch):
    """There is no room for what it is told, which is lost; once it has read, it hears what comes after that."""

    class Watched(socket.socket):
        def sendto(self, *arguments):
            assert self.gettimeout() == 0.0, "this would wait for the reader"
            return super().sendto(*arguments)

    with listening(str(tmp_path / "s")) as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
        fill(manager.getsockname())
        monkeypatch.setattr(socket, "socket", Watched)
        tell_service_manager(READY, status="lost")
        assert not any(heard_by(manager))
        tell_service_manager(READY, status="heard")
        assert heard_by(manager) == [b"READY=1\nSTATUS=heard"]
