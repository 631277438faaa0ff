"""Locks on files and directories, also on file systems that have none."""

import fcntl
import os

import pytest

from common.file_locks import directory_lock, is_locked, try_lock


def test_a_lock_ends_with_its_file(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY)
    assert not is_locked(tmp_path), "whoever looks keeps nothing"
    assert try_lock(fd, without_locks=False)
    assert is_locked(tmp_path)
    os.close(fd)
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("answer", [False, True])
def test_without_locks_nothing_counts_as_left_and_nobody_waits(answer, tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert try_lock(0, without_locks=answer) is answer
    assert is_locked(tmp_path)
    with directory_lock(tmp_path):
        pass
