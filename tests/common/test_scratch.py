"""Folders for work in progress: what is held stays, what was left goes, and a race between both harms nobody."""

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from common.scratch import scratch_folder

HOLDER = """
import signal, sys
from pathlib import Path
from common.scratch import scratch_folder

with scratch_folder(Path(sys.argv[1]), ".work-") as folder:
    (folder / "part").write_text("x")
    print(folder, flush=True)
    signal.pause()
"""


def test_what_a_process_left_that_was_killed_a_moment_ago_is_removed_and_what_is_held_is_not(tmp_path):
    holders = [subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) for _ in "ab"]
    try:
        lines = [holder.stdout.readline() for holder in holders]
        killed, held = [Path(line.decode().strip()) for line in lines]
        holders[0].kill()
        holders[0].wait()
        assert (killed / "part").exists(), "else there is nothing to remove"
        with scratch_folder(tmp_path, ".work-") as folder:
            assert sorted(tmp_path.iterdir()) == sorted([folder, held])
        assert (held / "part").exists()
    finally:
        for holder in holders:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            holder.stdout.close()


def test_a_folder_of_its_own_process_is_held_too(tmp_path):
    with scratch_folder(tmp_path, ".work-") as first, scratch_folder(tmp_path, ".work-") as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert list(tmp_path.iterdir()) == []


def test_another_prefix_a_file_and_a_link_are_left_alone(tmp_path):
    (tmp_path / ".workshop").mkdir()
    (tmp_path / ".work-file").write_text("x")
    (tmp_path / ".work-link").symlink_to(tmp_path / ".workshop")
    with scratch_folder(tmp_path, ".work-"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".work-file", ".work-link", ".workshop"]


def test_a_new_folder_that_is_taken_for_a_left_one_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    """Three times: removed before it is opened, held by its remover, removed after it was opened."""
    names, fds, make, open_ = [], [], tempfile.mkdtemp, os.open

    def make_and_lose(**where: object) -> str:
        names.append(make(**where))
        if len(names) == 1:
            os.rmdir(names[0])
        if len(names) == 2:
            fds.append(open_(names[1], os.O_RDONLY))
            fcntl.flock(fds[0], fcntl.LOCK_EX)
        return names[-1]

    def open_and_lose(path: Path, flags: int) -> int:
        fd = open_(path, flags)
        if len(names) == 3:
            os.rmdir(path)
        return fd

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    monkeypatch.setattr(os, "open", open_and_lose)
    with scratch_folder(tmp_path, ".work-") as folder:
        assert (str(folder), folder.is_dir()) == (names[3], True)
    os.close(fds[0])


def test_without_locks_nothing_is_removed_but_work_goes_on(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / ".work-left").mkdir()
    with scratch_folder(tmp_path, ".work-") as folder:
        assert folder.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == [".work-left"]
