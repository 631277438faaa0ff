"""What tests of several rooms share."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Matrices as small as the tests' gain nothing from a second thread, and lose much when the machine is busy."""


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The embedded default model's folder; fetched and converted once, into the user's cache."""
    from worker_proc.fetch_model import fetch_model

    return fetch_model("default")
