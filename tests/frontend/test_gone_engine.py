"""An engine is lost and does not come back: its clients say so soon; if it may, they wait. With real sockets."""

import asyncio
import contextlib
import fcntl
import os
import shutil

import pytest

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
