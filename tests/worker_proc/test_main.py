"""The worker's entry settles how torch's threads wait, and does so before torch is there to read it."""

import os
import subprocess
import sys

import pytest

from worker_proc import main, worker


class IdleWorker:
    """Stands in for the worker: starts and ends at once."""

    def __init__(self, config, link, rank) -> None:
        pass

    def run(self) -> int:
        return 0


@pytest.mark.parametrize(("users_choice", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_told_otherwise(users_choice, expected, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", users_choice or "")
    if users_choice is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(worker, "Worker", IdleWorker)
    assert main.main(None, None, 0) == 0
    assert os.environ["OMP_WAIT_POLICY"] == expected


def test_torch_is_not_imported_before_that():
    code = "import sys, worker_proc.main, common.child; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
