"""Who may bind an endpoint."""

import pytest
import zmq

from common.errors import StartupError
from common.sockets import bind_client_router, new_context


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
