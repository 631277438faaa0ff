"""Two engines never serve at one address: the second start is refused in one line."""

import pytest

from frontend import Client
from tests.support.server import START_TIMEOUT_S, Server


def refusal(server: Server) -> str:
    """The last line of an engine that does not start."""
    try:
        assert server.process.wait(START_TIMEOUT_S), "it has started"
        return server.stderr().splitlines()[-1]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("option", "address", "told"),
    [
        ("--client-endpoint", "ipc://{}/client.sock", "another engine serves there"),
        ("--uds", "{}/http.sock", "Address already in use"),
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
    with Server(tiny_model_dir) as last:
        port = last.ready["http"].rpartition(":")[2]
    both = [Server(tiny_model_dir, "--port", port) for _ in range(2)]
    try:
        lines = [server.process.stdout.readline() for server in both]
        assert sorted(map(bool, lines)) == [False, True], lines
        loser = both[[bool(line) for line in lines].index(False)]
        assert f"--port {port} on 127.0.0.1 is in use" in loser.stderr()
    finally:
        for server in both:
            server.close()
