"""Run directories are private, found while in use, and removed when not."""

import errno
import fcntl
import os
import stat

import pytest

from common import run_dir as module
from common.errors import StartupError
from common.run_dir import PREFIX, RunDir, base_dir, instances, write_atomically


def test_private_and_removed(tmp_path):
    with RunDir(tmp_path) as run_dir:
        assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
        assert stat.S_IMODE(run_dir.write("config.json", "{}").stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []


def test_two_instances_do_not_disturb_each_other(tmp_path):
    with RunDir(tmp_path) as first, RunDir(tmp_path) as second:
        first.write("ready.json", '{"pid": 1}')
        assert first.path != second.path
        found = {instance.path: instance for instance in instances(tmp_path)}
        assert found[first.path].ready == {"pid": 1}
        assert found[second.path].ready == {}
        assert {instance.pid for instance in found.values()} == {os.getpid()}


def test_only_a_run_directory_whose_engine_has_ended_is_never_served_again(tmp_path, monkeypatch):
    """A service manager removes its services' directories when they end, and makes them again."""
    assert module.may_return(tmp_path / "removed" / "client.sock")
    with RunDir(tmp_path) as run_dir:
        socket = run_dir.path / "client.sock"
        assert module.may_return(socket)
        (run_dir.path / "lock").rename(run_dir.path / "other")
        assert module.may_return(socket), "not a directory of ours"
        (run_dir.path / "other").rename(run_dir.path / "lock")
        os.close(run_dir._lock_fd)
        run_dir._lock_fd = -1  # as if its engine had been killed
        assert not module.may_return(socket)
        with monkeypatch.context() as patched:
            patched.setattr(module, "is_locked", lambda _: os.open("/", os.O_RDWR))
            assert module.may_return(socket), "nobody can tell where no file can be opened"
    assert not module.may_return(socket)


@pytest.mark.parametrize(
    ("name", "is_left"),
    [(None, True), ("trireme-llm", False), ("trireme-frontend", True), ("trireme-Frontend", False),
     ("own/trireme-frontend", False), ("trireme-frontend2", False), ("frontend", False)],
)  # fmt: skip
def test_a_removed_run_directory_is_told_from_one_that_may_be_made_yet(name, is_left, tmp_path, monkeypatch):
    """Nobody knows the name of the former before it is made: it is drawn by lot."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with RunDir(tmp_path) as made:
        folder = tmp_path / name if name else made.path
        assert not name or module.is_left_behind(folder / "client.sock") == is_left
        assert not module.is_left_behind(made.path / "client.sock"), "it is in use"
        (made.path / "lock").rename(made.path / "other")
        assert not module.is_left_behind(made.path / "client.sock"), "it is there"
    assert module.is_left_behind(folder / "client.sock") == is_left


def test_a_killed_instances_directory_is_removed_by_the_next_start(tmp_path):
    stale = tmp_path / (PREFIX + "gone")
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "requests.sock").touch()
    foreign = tmp_path / (PREFIX + "notes")  # no lock file: not ours to remove
    foreign.mkdir()
    with RunDir(tmp_path):
        assert not stale.exists()
        assert foreign.exists()
    assert instances(tmp_path) == []


def test_a_directory_taken_for_stale_before_its_lock_is_made_again(tmp_path, monkeypatch):
    made = []
    lock = fcntl.flock

    def remove_the_first(fd: int, how: int) -> None:
        if not made:
            made.append(next(tmp_path.glob(PREFIX + "*")))
            module.shutil.rmtree(made[0])
        lock(fd, how)

    monkeypatch.setattr(module.fcntl, "flock", remove_the_first)
    with RunDir(tmp_path) as run_dir:
        assert run_dir.path != made[0]
        assert run_dir.path.is_dir()


def test_a_file_system_without_locks_is_named_once(tmp_path, monkeypatch):
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    with pytest.raises(StartupError, match=f"cannot make a run directory in {tmp_path}: No locks available"):
        RunDir(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sockets_fit_and_long_paths_are_passed_over(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert base_dir() != long
    monkeypatch.setattr(module, "SOCKET_PATH_LIMIT", 10)
    with pytest.raises(StartupError, match="set TMPDIR or XDG_RUNTIME_DIR"):
        base_dir()


def test_atomic_write_leaves_nothing_beside(tmp_path):
    write_atomically(tmp_path / "ready.json", "1")
    write_atomically(tmp_path / "ready.json", "2")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("ready.json", "2")]


def test_an_unwritable_base_is_one_line(tmp_path):
    with pytest.raises(StartupError, match="cannot make a run directory in"):
        RunDir(tmp_path / "missing")


def test_lock_is_not_inherited(tmp_path):
    with RunDir(tmp_path) as run_dir:
        assert not os.get_inheritable(run_dir._lock_fd)
