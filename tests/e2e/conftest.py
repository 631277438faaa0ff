"""Real engines for end-to-end tests: one shared server on a tiny model, and the folder it is made of."""

from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.server import Server


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A complete random model folder."""
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def long_model_dir(tmp_path_factory) -> Path:
    """The same with room for an answer that takes longer than anything that a test waits for."""
    return tiny.save_model(tmp_path_factory.mktemp("model") / "long", max_position_embeddings=1 << 16)


@pytest.fixture(scope="session")
def server(tiny_model_dir):
    """A running engine that the tests of a session share; it must survive each of them."""
    with Server(tiny_model_dir, "--dtype", "float32", "--block-size", "4", "--num-kv-blocks", "256") as running:
        yield running
