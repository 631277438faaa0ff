"""An engine is lost and does not come back: its clients say so soon; if it may, they wait. With real sockets."""

import asyncio
import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from common import run_dir
from common.errors import EngineDeadError
from frontend import AsyncClient, Client, client_state
from tests.support.ports import reserved_port


@pytest.fixture
def asking():
    """Opens a client of either kind beside a loop's thread, which waits for an hour, longer than a test may take; gives
    it, and what asks for a ping, again and again."""
    with contextlib.ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        stack.callback(lambda: loop.run_until_complete(loop.shutdown_default_executor()))

        def make(kind, endpoint: str):
            if kind is Client:
                client = stack.enter_context(Client(endpoint, timeout_s=3600))
                return client, client.ping
            client = loop.run_until_complete(AsyncClient(endpoint, timeout_s=3600).open())
            stack.callback(lambda: loop.run_until_complete(client.close()))
            return client, lambda: loop.run_until_complete(client.ping())

        yield make


@pytest.fixture
def port():
    with reserved_port() as number:
        yield number


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_an_engine_that_nobody_starts_again_is_gone_soon(run_frontend, asking, monkeypatch, kind, transport, port):
    """Every request waited for all of its client's `timeout_s`."""
    frontend = run_frontend(server={"client_endpoint": f"tcp://127.0.0.1:{port}"} if transport == "tcp" else {})
    _, ask = asking(kind, frontend.endpoint)
    assert ask() > 0
    frontend.lose()
    monkeypatch.setattr(client_state, "GONE_S", 0.2)
    with pytest.raises(EngineDeadError, match="is lost"):  # it may have been sent before the loss was seen
        ask()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="is lost, and nobody serves there any more"):
            ask()
    run_frontend(server={"client_endpoint": frontend.endpoint})
    assert ask() > 0, "one that is started after all is found"


@pytest.mark.parametrize("engine_listens_again", [False, True])
def test_whether_somebody_listens_is_asked_a_few_times_whoever_waits(monkeypatch, engine_listens_again):
    """Each of the requests that waited asked ten times a second. That nobody does is never an old answer."""
    clock, asked, refuses = [100.0], [], [True]
    monkeypatch.setattr(client_state, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(client_state, "is_refused", lambda _: asked.append(clock[0]) or refuses[0])
    connection = client_state.Connection("tcp://127.0.0.1:1", None)
    for tick in range(50):
        clock[0] = 100.0 + 0.1 * tick
        assert not any(connection.hopeless("") for _ in range(100))
    assert len(asked) == client_state.PROBES
    clock[0], refuses[0] = 100.0 + client_state.GONE_S, not engine_listens_again
    assert bool(connection.hopeless("")) != engine_listens_again
    refuses[0] = True
    assert bool(connection.hopeless("")) != engine_listens_again, "a new wait begins"


def test_an_engine_that_came_back_and_is_lost_again_is_waited_for_again(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(client_state, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(client_state, "is_refused", lambda _: True)
    monkeypatch.setattr(client_state, "connection_event", lambda event: event)
    connection = client_state.Connection("tcp://127.0.0.1:1", None)
    assert not connection.hopeless("")
    connection.note(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    clock[0] += 2 * client_state.GONE_S
    assert not connection.hopeless("")
    assert connection.note(zmq.EVENT_DISCONNECTED)
    assert not connection.hopeless("")
    clock[0] += client_state.GONE_S
    assert connection.hopeless("")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("restart", [True, False])
def test_an_engine_whose_run_directory_is_gone_is_gone_at_once(
    run_frontend, asking, monkeypatch, kind, restart, tmp_path
):
    """With `--restart` too: it is the supervisor that starts processes again, and it has ended."""
    monkeypatch.setattr(client_state, "GONE_S", 3600)
    folder = tmp_path / f"{run_dir.PREFIX}x"
    folder.mkdir()
    frontend = run_frontend(server={"client_endpoint": f"ipc://{folder}/client.sock", "restart": restart})
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _, ask = asking(kind, frontend.endpoint)
    assert ask() > 0
    frontend.lose()
    os.close(lock)  # as if the supervisor had been killed
    with pytest.raises(EngineDeadError, match="is lost"):
        ask()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="nobody serves there any more"):
            ask()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def left_socket(tmp_path):
    """The endpoint of a killed engine in a run directory."""
    folder = tmp_path / f"{run_dir.PREFIX}x"
    folder.mkdir()
    (folder / "lock").touch()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{folder}/client.sock")
    return f"ipc://{folder}/client.sock"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_new_client_does_not_wait_at_what_a_killed_engine_left(asking, left_socket, kind):
    """It waited for all of its `timeout_s`."""
    with pytest.raises(EngineDeadError, match=r"no engine serves at .* any more: the one that did was killed"):
        asking(kind, left_socket)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_new_client_does_not_wait_where_an_engine_has_removed_its_run_directory(asking, kind, tmp_path, monkeypatch):
    """As a program does that has kept the endpoint of an engine which was stopped since."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with run_dir.RunDir(tmp_path) as removed:
        pass
    with pytest.raises(EngineDeadError, match=r"no engine serves at .* any more: the one that did has ended"):
        asking(kind, f"ipc://{removed.path}/client.sock")


def test_a_new_client_waits_wherever_an_engine_may_start_or_serves(left_socket, run_frontend):
    """The lock's holder is a supervisor whose frontend is still starting; another directory may get another engine."""
    connection, folder = client_state.Connection(left_socket, None), Path(left_socket.removeprefix("ipc://")).parent
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert connection.hopeless(None) is None
    other = folder.rename(folder.with_name("own"))
    assert client_state.Connection(f"ipc://{other}/client.sock", None).hopeless(None) is None
    assert client_state.Connection(f"ipc://{folder}/client.sock", None).hopeless(None) is None, "not made yet"
    run_frontend(server={"client_endpoint": f"ipc://{other}/client.sock"})
    other.rename(folder)
    assert connection.hopeless(None) is None, "somebody serves, whoever holds the lock"


def test_a_client_that_has_waited_in_vain_is_told_whether_anybody_listens(tmp_path):
    with pytest.raises(EngineDeadError, match=r"within 0\.05 s: nobody listens there$"):
        Client(f"ipc://{tmp_path}/nothing.sock", timeout_s=0.05)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_engine_that_is_started_again_is_waited_for(run_frontend, asking, monkeypatch, kind):
    monkeypatch.setattr(client_state, "GONE_S", 0.0)
    frontend = run_frontend(server={"restart": True})
    client, ask = asking(kind, frontend.endpoint)
    assert ask() > 0
    frontend.lose()
    client.timeout_s = 0.3
    with pytest.raises((EngineDeadError, TimeoutError)):  # the latter if it was sent before the loss was seen
        ask()
    with pytest.raises(EngineDeadError, match=r"no engine can be reached at .* within 0\.3 s"):
        ask()
