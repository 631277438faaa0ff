"""Clients beyond what file descriptors allow are refused, and those that stay all the same are cut."""

import contextlib

import pytest
import zmq

from common import client_messages as wire
from common.errors import EngineDeadError, RequestError
from frontend import Client, connections
from frontend.connections import Connections


@pytest.mark.parametrize(
    ("files", "limit", "tolerance"),
    [(256, 128, 64), (1024, 512, 256), (65_536, 65_024, 256), (-1, 1 << 30, 512)],
)
def test_the_limit_of_open_files_bounds_connections(monkeypatch, files, limit, tolerance):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (files, files))
    allowed = Connections.allowed()
    assert (allowed.limit, allowed.tolerance) == (limit, tolerance)


@pytest.mark.parametrize("events_are_read", [True, False], ids=["events first", "messages first"])
def test_a_client_too_many_is_refused_and_the_others_are_served(frontend, events_are_read):
    """A message may be read before the event that tells of its connection."""
    frontend.frontend._engine.connections.limit = 3
    if not events_are_read:
        reader = frontend.frontend._clients._monitor._reader
        frontend.frontend._ended.get_loop().call_soon_threadsafe(reader._loop.remove_reader, reader._fd)
    with contextlib.ExitStack() as stack:
        first, _ = (stack.enter_context(Client(frontend.endpoint)) for _ in range(2))
        with Client(frontend.endpoint) as last:
            with pytest.raises(RequestError, match="3 connections are open, as many as") as caught:
                Client(frontend.endpoint)
            assert (caught.value.code, caught.value.status) == ("too_many_connections", 503)
            assert first.ping() < 20 and last.ping() < 20
        while True:  # until the engine has seen that the last one is gone
            with contextlib.suppress(RequestError), Client(frontend.endpoint) as again:
                assert again.generate("the sea", {"max_tokens": 2}).samples[0].finish_reason == "length"
                return


def test_clients_that_stay_all_the_same_are_cut_before_descriptors_run_out(frontend, caplog):
    """ZeroMQ aborts a process that cannot accept a connection for want of descriptors (ipc_listener.cpp)."""
    frontend.scheduler.gate.clear()
    with zmq.Context() as context, Client(frontend.endpoint) as client:
        stream = client.generate("the sea", {"max_tokens": 2000, "ignore_eos": True}, stream=True)
        frontend.scheduler.wait_until(lambda: frontend.scheduler.added)
        open_connections = frontend.frontend._engine.connections
        open_connections.limit, open_connections.tolerance = 3, 2
        stubborn = [context.socket(zmq.DEALER) for _ in range(7)]
        for socket in stubborn:
            socket.connect(frontend.endpoint)
            socket.send(wire.Ping("x").to_wire())
        with pytest.raises(Exception, match="is lost"):
            list(stream)
        for socket in stubborn:
            socket.close(linger=0)
        frontend.scheduler.wait_until(lambda: frontend.scheduler.aborted)
    frontend.scheduler.gate.set()
    assert "cutting the former, before file descriptors run out" in caplog.text
    while True:  # those that stay come again until they are closed, and may be cut once more
        with contextlib.suppress(RequestError, EngineDeadError), Client(frontend.endpoint) as again:
            assert again.generate("the sea", {"max_tokens": 2}).samples[0].finish_reason == "length"
            return
