"""Fixtures for every room's tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The embedded default model, fetched and converted into the user's cache if it is not there."""
    from worker_proc.fetch_model import fetch_model

    return fetch_model("default")
