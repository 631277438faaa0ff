"""Who may bind an endpoint."""

import errno
import os
import socket as unix
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import zmq

from common import sockets
from common.config import ServerOptions
from common.errors import StartupError
from common.file_locks import directory_lock
from common.http_socket import bind_http
from common.sockets import bind_client_router, connect_client, new_context


@pytest.fixture
def context():
    made = new_context()
    yield made
    made.destroy(linger=0)


def test_a_client_endpoint_that_another_engine_serves_is_refused(context, tmp_path):
    """ZeroMQ unlinks the file and binds anew: the first engine would serve on unseen, with nobody reaching it."""
    endpoint = f"ipc://{tmp_path}/client.sock"
    with bind_client_router(context, endpoint):
        with pytest.raises(StartupError, match="another engine serves there"):
            bind_client_router(context, endpoint)
        with context.socket(zmq.DEALER) as client:
            client.set(zmq.LINGER, 0)
            client.connect(endpoint)
            client.send(b"x")


def test_a_client_endpoint_left_by_a_dead_engine_is_taken(context, tmp_path):
    path = tmp_path / "client.sock"
    with zmq.Context() as other, other.socket(zmq.ROUTER) as left:
        left.bind(f"ipc://{path}")
        kept = tmp_path / "kept.sock"
        path.rename(kept)
    kept.rename(path)
    assert path.is_socket()
    bind_client_router(context, f"ipc://{path}").close()


def test_two_engines_that_look_at_the_same_moment_do_not_both_take_the_endpoint(context, tmp_path, monkeypatch):
    """Both found nobody there, and the second removed the first one's file."""
    both_looked = threading.Barrier(2)
    look = sockets.is_served

    def look_together(endpoint: str) -> bool:
        found = look(endpoint)
        try:
            both_looked.wait(0.2)
        except threading.BrokenBarrierError:
            both_looked.reset()
        return found

    monkeypatch.setattr(sockets, "is_served", look_together)
    refused: list[StartupError] = []
    bound: list[zmq.Socket] = []

    def bind() -> None:
        try:
            bound.append(bind_client_router(context, f"ipc://{tmp_path}/client.sock"))
        except StartupError as error:
            refused.append(error)

    threads = [threading.Thread(target=bind) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(bound), len(refused)) == (1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["client.sock"], "nothing else is left behind"


def test_an_endpoint_in_a_directory_that_another_program_locks_is_refused(context, tmp_path, monkeypatch):
    monkeypatch.setattr("common.file_locks.TIMEOUT_S", 0.01)
    with directory_lock(tmp_path):
        with pytest.raises(StartupError, match="another program has had it locked for 0.01 s"):
            bind_client_router(context, f"ipc://{tmp_path}/client.sock")
        with pytest.raises(StartupError, match="another program"):
            bind_http(ServerOptions(uds=str(tmp_path / "http.sock")))
    bind_http(ServerOptions(uds=str(tmp_path / "http.sock"))).close()


def test_an_endpoint_in_no_directory_is_refused(context, tmp_path):
    with pytest.raises(StartupError, match="cannot bind .*No such file or directory") as caught:
        bind_client_router(context, f"ipc://{tmp_path}/nowhere/client.sock")
    assert "addr=" not in str(caught.value), "the endpoint is named already"


@pytest.mark.parametrize(
    "endpoint", ["nonsense", "", "http://127.0.0.1:5555", *(f"tcp://127.0.0.1{port}" for port in ("", ":0", ":70000"))]
)
def test_what_is_no_endpoint_is_not_connected_to(endpoint):
    """ZeroMQ takes port 70000 for port 4464."""
    with pytest.raises(StartupError, match="cannot connect to .*: wanted ipc://PATH or tcp://ADDRESS:PORT with"):
        connect_client(endpoint)


def test_who_is_not_there_refuses(context, tmp_path, monkeypatch):
    served, stale, missing = (f"ipc://{tmp_path}/{name}" for name in ("served", "stale", "missing"))
    local = bind_client_router(context, served)
    with unix.socket(unix.AF_UNIX) as socket:
        socket.bind(stale.removeprefix("ipc://"))
    router = bind_client_router(context, "tcp://127.0.0.1:*")
    listening = router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
    with unix.create_server(("127.0.0.1", 0)) as free:
        silent = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        assert not sockets.is_refused(silent)
    assert [sockets.is_refused(endpoint) for endpoint in (served, stale, missing, "ipc://@none")] == [
        False,
        True,
        True,
        False,
    ]
    assert [sockets.is_refused(endpoint) for endpoint in (listening, silent)] == [False, True]
    assert not sockets.is_refused("tcp://no-such-host.invalid:5555"), "who cannot be asked has not refused"
    with monkeypatch.context() as patched:
        patched.setattr(sockets.unix, "socket", lambda *_: os.open("/", os.O_RDWR))
        assert not sockets.is_refused(stale), "nor whoever cannot be asked for lack of a file descriptor"
    local.close()
    router.close()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(zmq, "Context"), (zmq.Context, "socket"), (zmq.Socket, "get_monitor_socket"), (zmq.Socket, "connect")],
    ids=["context", "socket", "monitor", "connection"],
)
def test_whatever_finds_no_room_says_so_in_our_words(owner, name, monkeypatch, tmp_path):
    def find_no_room(*arguments):
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(owner, name, find_no_room)
    with pytest.raises(StartupError, match="cannot connect to .*client.sock': Too many open files"):
        connect_client(f"ipc://{tmp_path}/client.sock")


WITH_FEW_FILES = """
import os, resource, sys, zmq
from common.errors import StartupError
from common.sockets import connect_client, new_context

def context_with_a_socket():
    context = new_context()
    return context, context.socket(zmq.PULL)

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
clients = [lambda: connect_client(sys.argv[1]), lambda: connect_client("tcp://127.0.0.1:9")]
for free in range(14):
    for make in (*clients, context_with_a_socket):
        held = []
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for file in held[len(held) - free:]:
                os.close(file)
        try:
            context = make()[0]
        except StartupError as error:
            assert "Too many open files" in str(error) and free < 9, (free, error)
        else:
            context.destroy(linger=0)
            assert free > 5, free
        for file in held[:len(held) - free]:
            os.close(file)
print("all", free)
"""


def test_a_process_with_few_file_descriptors_left_is_told_and_lives(tmp_path):
    """ZeroMQ aborted the whole program where a client found two to four."""
    command = [sys.executable, "-c", WITH_FEW_FILES, f"ipc://{tmp_path}/client.sock"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert done.stdout == "all 13\n", done.stderr


def test_a_port_in_use_names_the_option(context):
    first = bind_client_router(context, "tcp://127.0.0.1:*")
    with pytest.raises(StartupError, match="it is in use; choose another --client-endpoint"):
        bind_client_router(context, first.get_string(zmq.LAST_ENDPOINT))
    first.close()
