"""Fixtures for every room's tests."""

import os
import tempfile
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # tests often share their cores; worker_proc/main.py says why
os.environ.setdefault("OMP_NUM_THREADS", "1")  # matrices as small as the tests' gain nothing from a second thread

# Importing transformers' models makes torch create this folder, in the system's temporary one by default.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "torchinductor"))

import torch

from kernels import interpreter

# Tests make sockets in their folders, and the system takes 107 bytes for a socket's path: some have 20 left in /tmp.
if len(tempfile.gettempdir()) > len("/tmp") + 20:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/tmp")

# Our servers are on this machine, whatever proxy leads to others.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1,localhost"]))

# Here, before any test is imported: `@settings` keeps what it finds then. Other programs on the machine are no fault of
# ours, and an example that fails is the fault of whoever changed something: each run makes up the same ones.
hypothesis.settings.register_profile(
    "trireme", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("trireme")

COMPILING_TIMEOUT_S = 300
"""Of a test on a GPU, in which some may compile a dozen kernels while other processes do the same."""

if torch.cuda.is_available():
    from kernels.compile_ahead import name_alike

    name_alike()  # so that of several processes of pytest-xdist each takes from disk what another one has compiled
else:
    interpreter.enable()  # before any test imports a kernel: one that is imported earlier is not interpreted


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on a GPU have more time, since most of it is the compiler's."""
    for item in items:
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(COMPILING_TIMEOUT_S))


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The embedded default model, fetched and converted into the user's cache if it is not there."""
    from worker_proc.fetch_model import fetch_model

    return fetch_model("default")
