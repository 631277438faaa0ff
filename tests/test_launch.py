"""The supervisor with real child processes that play the rooms: start, loss, hang, stop."""

import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import launch
from common import run_dir
from common.config import EngineConfig, ServerOptions
from common.errors import ConfigError, EngineDeadError, RequestError, StartupError, exit_code
from common.messages import Stop
from common.run_dir import RunDir
from common.version import own_version
from launcher import command
from launcher import supervisor as supervision
from launcher.restarts import WINDOW_S, Restarts
from launcher.supervisor import ProcessLost, StopRequested, Supervisor, Wakeup
from tests.support.processes import alive

ROOM = """
import os, select, sys
from pathlib import Path

room, how, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
del sys.argv[1:4]
if how == "import":
    import there_is_no_such_module

from common.child import run_child
from common.errors import ConfigError
from common.messages import NewSession, Stop

def main(config, link, rank):
    if how == "config":
        raise ConfigError("unknown architecture 'Foo'")
    if how == "silent":
        os._exit(7)
    if how == "lost" and config.session:
        raise RuntimeError("never again")
    if how != "slow":
        link.ready(f"in session {config.session}")
    if how == "lingering":
        link.failed("CUDA error: unspecified launch failure")
        select.select([], [], [])
    while True:
        select.select([link.wake_fd], [], [])
        for order in link.take_orders():
            with open(folder / "orders", "a") as file:
                file.write(f"{room} {order}\\n")
            if not isinstance(order, NewSession) and (how != "finishing" or not isinstance(order, Stop)):
                return 0

run_child(room, main)
"""


class Engine:
    """A supervisor and the folder in which its children leave notes."""

    def __init__(self, folder: Path, **server: object) -> None:
        self.folder = folder
        self.wakeup = Wakeup()
        (folder / "room.py").write_text(ROOM)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "run").mkdir()
        self.run_dir = RunDir(folder / "run")
        self.how = {"worker": "good", "frontend": "good", "scheduler": "good"}
        self.server = ServerOptions(port=0, **server)
        self.supervisor: Supervisor | None = None

    def start(self, **how: str) -> Supervisor:
        model = dataclasses.replace(EngineConfig().model, model=str(self.folder / "model"))
        config = EngineConfig(model=model, server=self.server, run_dir=str(self.run_dir.path))
        script = str(self.folder / "room.py")
        names = {"worker": "worker-0", "frontend": "frontend", "scheduler": "scheduler"}
        rooms = {names[r]: [script, r, h, str(self.folder)] for r, h in (self.how | how).items()}
        self.supervisor = Supervisor(config, self.run_dir, self.wakeup, rooms=rooms)
        self.supervisor.start()
        return self.supervisor

    def pid(self, name: str) -> int:
        assert self.supervisor is not None
        return self.supervisor._peers[name].child.pid

    def orders(self) -> list[str]:
        """What the children were told, by the time at which they took note; in order for each of them alone."""
        return (self.folder / "orders").read_text().splitlines()

    def waits_for(self, name: str) -> bool:
        """Whether this process has been heard of, and is the only one that is not ready."""
        assert self.supervisor is not None
        peers = self.supervisor._peers
        return len(peers) == len(self.how) and self.supervisor._unready() == [name] and bool(peers[name].state)

    def watch(self, seconds: float = 30.0) -> None:
        assert self.supervisor is not None
        deadline = time.monotonic() + seconds
        self.supervisor.run_until(lambda: time.monotonic() > deadline)

    def close(self) -> None:
        pids = []
        if self.supervisor is not None:
            pids = [peer.child.pid for peer in self.supervisor._peers.values()]
            self.supervisor.close()
        self.run_dir.remove()
        assert [pid for pid in pids if alive(pid)] == [], "children left behind"


@pytest.fixture
def engine(tmp_path_factory, monkeypatch) -> Iterator[Engine]:
    """One that gives its children all the time they want to do as they are told: the machine may be busy."""
    monkeypatch.setattr(supervision, "FAILURE_NOTICE_S", 60.0)
    monkeypatch.setattr(supervision, "EXIT_TIMEOUT_S", 60.0)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    engine = Engine(tmp_path_factory.mktemp("e"))  # a short name: there are sockets in it
    try:
        yield engine
    finally:
        engine.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_start_and_ordered_stop(engine: Engine):
    supervisor = engine.start()
    supervisor.stop(1.5)
    assert engine.orders()[0] == "frontend Stop(grace_ms=1500)"
    assert sorted(engine.orders()[1:]) == ["scheduler Stop(grace_ms=0)", "worker Stop(grace_ms=0)"]


def no_memory(*_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def test_a_process_that_the_system_cannot_start_is_named(engine: Engine, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", no_memory)
    with pytest.raises(StartupError, match="^cannot start worker-0: Cannot allocate memory$"):
        engine.start()


def test_a_process_that_the_system_cannot_start_again_ends_the_run(restarting: Engine, monkeypatch):
    restarting.start()
    monkeypatch.setattr(subprocess, "Popen", no_memory)
    os.kill(restarting.pid("worker-0"), signal.SIGKILL)
    with pytest.raises(ProcessLost, match=r"^worker-0 was killed.*; cannot start worker-0: Cannot allocate memory$"):
        restarting.watch()


@pytest.mark.parametrize("name", ["worker-0", "frontend"])
def test_a_run_directory_that_is_gone_ends_the_run(restarting: Engine, name):
    """As where something cleans up temporary files: in a traceback, and clients had no error."""
    supervisor = restarting.start()
    shutil.rmtree(restarting.run_dir.path)
    os.kill(restarting.pid(name), signal.SIGKILL)
    with pytest.raises(
        ProcessLost, match=rf"^{name} was killed.*; cannot write .*config\.json: No such file"
    ) as caught:
        restarting.watch()
    supervisor.announce_loss(caught.value)
    if name != "frontend":
        assert any(order.startswith("frontend PeerFailed") for order in restarting.orders())


def test_a_start_without_room_in_the_run_directory_is_told_in_a_sentence(engine: Engine, monkeypatch):
    monkeypatch.setattr(run_dir, "write_atomically", no_memory)
    with pytest.raises(StartupError, match=r"^cannot write .*config\.json: Cannot allocate memory$"):
        engine.start()


def test_a_refused_configuration_is_told_in_its_own_words(engine: Engine):
    with pytest.raises(ProcessLost, match=r"^worker-0 failed: unknown architecture 'Foo'$") as caught:
        engine.start(worker="config")
    assert caught.value.exit_code == 2


def test_a_failed_start_is_told_by_nobody_else(engine: Engine, monkeypatch):
    """The frontend logged it a second time, if it was told before it was ended."""
    with pytest.raises(ProcessLost, match="^worker-0 failed") as caught:
        engine.start(worker="config", frontend="slow")
    told: list[object] = []
    monkeypatch.setattr(engine.supervisor, "_order", lambda *order: told.append(order))
    engine.supervisor.announce_loss(caught.value)
    assert told == []


def test_a_crash_at_import_shows_its_error(engine: Engine):
    with pytest.raises(ProcessLost, match=r"scheduler ended with exit code 1: ModuleNotFoundError: No module named"):
        engine.start(scheduler="import")


def test_an_end_without_a_word_names_the_exit_code(engine: Engine):
    with pytest.raises(ProcessLost, match=r"^frontend ended with exit code 7$"):
        engine.start(frontend="silent")


def test_slow_start_has_a_deadline(engine: Engine, monkeypatch):
    """It passes as soon as only the worker is waited for: how long the others take depends on the machine."""
    limit_s = engine.server.startup_timeout

    def monotonic() -> float:
        is_last = engine.supervisor is not None and engine.waits_for("worker-0")
        return time.monotonic() + (limit_s if is_last else 0.0)

    monkeypatch.setattr(supervision, "time", SimpleNamespace(monotonic=monotonic))
    with pytest.raises(StartupError, match=f"^worker-0 not ready within --startup-timeout, which is {limit_s:g} s$"):
        engine.start(worker="slow")


@pytest.mark.parametrize("name", ["worker-0", "scheduler", "frontend"])
def test_a_killed_process_is_noticed_and_the_frontend_told(engine: Engine, name: str):
    supervisor = engine.start()
    os.kill(engine.pid(name), signal.SIGKILL)
    with pytest.raises(ProcessLost, match=rf"^{name} was killed by signal 9 \(SIGKILL\); the system may") as caught:
        engine.watch()
    supervisor.announce_loss(caught.value)
    if name != "frontend":
        assert f"frontend PeerFailed(process='{name}', message='{name} was killed" in "\n".join(engine.orders())


def test_a_stopped_process_is_noticed(engine: Engine):
    engine.start()
    os.kill(engine.pid("scheduler"), signal.SIGSTOP)
    with pytest.raises(ProcessLost, match=r"^scheduler does not respond: no heartbeat for \d+\.\d s$"):
        engine.watch()


def test_a_process_that_has_failed_and_does_not_end_is_not_waited_for(engine: Engine):
    """A driver may take its time to give back what a worker had on the device."""
    supervisor = engine.start(worker="lingering")
    with pytest.raises(ProcessLost, match="^worker-0 failed: CUDA error: unspecified launch failure$") as caught:
        engine.watch()
    assert supervisor._peers["worker-0"].child.exit_code is None
    supervisor.announce_loss(caught.value)
    assert any("PeerFailed(process='worker-0'" in order for order in engine.orders())


@pytest.fixture
def restarting(engine: Engine) -> Engine:
    """An engine that may start processes again twice."""
    engine.server = dataclasses.replace(engine.server, restart=True, restart_limit=2)
    return engine


def kill_and_wait(engine: Engine, name: str) -> None:
    """Until all processes are ready again."""
    os.kill(engine.pid(name), signal.SIGKILL)
    before = engine.supervisor._restarts.count
    engine.supervisor.run_until(lambda: engine.supervisor._restarts.count > before and not engine.supervisor._unready())


@pytest.mark.parametrize(
    ("name", "again", "told"),
    [
        ("worker-0", {"worker-0", "scheduler"}, "frontend"),
        ("scheduler", {"worker-0", "scheduler"}, "frontend"),
        ("frontend", {"frontend"}, "scheduler"),
    ],
)
def test_a_lost_process_is_started_again_with_those_that_need_it(restarting: Engine, name, again, told):
    supervisor = restarting.start()
    before = {process: peer.child.pid for process, peer in supervisor._peers.items()}
    kill_and_wait(restarting, name)
    assert {process for process, pid in before.items() if restarting.pid(process) != pid} == again
    supervisor.stop(0.0)
    orders = restarting.orders()
    message = (
        f"{name} was killed by signal 9 (SIGKILL); the system may have run out of memory; it is being started again"
    )
    new_session = f"{told} NewSession(process='{name}', message='{message}', session=1)"
    assert next(order for order in orders if order.startswith(told)) == new_session
    orders.remove(new_session)
    assert sorted(order.split("(")[0] for order in orders) == ["frontend Stop", "scheduler Stop", "worker Stop"]


def test_a_restart_leaves_no_sockets_of_earlier_sessions(restarting: Engine):
    restarting.start()
    for name in ("requests", "outputs", "plans-0", "results", "supervisor", "client"):
        (restarting.run_dir.path / f"{name}.sock").touch()
    left = lambda: {path.stem for path in restarting.run_dir.path.glob("*.sock")}  # noqa: E731
    kill_and_wait(restarting, "frontend")
    assert left() == {"plans-0", "results", "supervisor", "client"}, "the scheduler and the worker go on"
    kill_and_wait(restarting, "worker-0")
    assert left() == {"supervisor", "client"}


def test_losses_beyond_the_limit_end_the_run(restarting: Engine):
    restarting.start()
    kill_and_wait(restarting, "scheduler")
    kill_and_wait(restarting, "frontend")
    os.kill(restarting.pid("worker-0"), signal.SIGKILL)
    wanted = r"^worker-0 was killed.*; it is not started again: --restart-limit is 2 within 5 minutes$"
    with pytest.raises(ProcessLost, match=wanted):
        restarting.watch()


def test_a_process_that_fails_each_time_ends_the_run(restarting: Engine):
    restarting.start(worker="lost")
    os.kill(restarting.pid("worker-0"), signal.SIGKILL)
    with pytest.raises(ProcessLost, match=r"^worker-0 failed: RuntimeError: never again; it is not started again"):
        restarting.watch()


def test_a_restart_has_a_deadline_too(restarting: Engine, monkeypatch):
    supervisor = restarting.start()
    kill_and_wait(restarting, "scheduler")
    supervisor._peers["scheduler"].ready_after_s = None
    supervisor._restart_deadline_s = 0.0
    with pytest.raises(ProcessLost, match="^scheduler not ready within --startup-timeout") as caught:
        supervisor._check_restart()
    assert caught.value.process == "scheduler"


def test_a_loss_before_the_engine_was_ready_is_final(restarting: Engine):
    with pytest.raises(ProcessLost, match=r"^frontend ended with exit code 7$"):
        restarting.start(frontend="silent")


def test_restarts_are_counted_within_five_minutes():
    now = [0.0]
    restarts = Restarts(2, lambda: now[0])
    assert [restarts.take() for _ in range(3)] == [True, True, False]
    now[0] = WINDOW_S - 1
    assert not restarts.take()
    now[0] = WINDOW_S
    assert [restarts.take() for _ in range(3)] == [True, True, False]
    assert restarts.count == 4


@pytest.mark.parametrize(("name", "number"), [("worker-0", signal.SIGKILL), ("scheduler", signal.SIGSTOP)])
def test_a_loss_while_requests_finish_is_told_at_once_and_is_no_good_end(engine: Engine, name: str, number: int):
    supervisor = engine.start(frontend="finishing")
    os.kill(engine.pid(name), number)
    with pytest.raises(ProcessLost, match=f"^{name} (was killed by signal 9|does not respond)"):
        supervisor.stop(600.0)
    orders = [order for order in engine.orders() if order.startswith("frontend")]  # the others write there too
    assert orders[0] == "frontend Stop(grace_ms=600000)" and len(orders) == 2, orders
    assert orders[1].startswith(f"frontend PeerFailed(process='{name}'")


@pytest.mark.parametrize("restart", [False, True])
def test_a_frontend_that_is_lost_while_requests_finish_is_no_good_end(engine: Engine, restart: bool):
    """The run ended with code 0, as if they had finished; nobody is left for whom a new one would be started."""
    engine.server = dataclasses.replace(engine.server, restart=restart)
    supervisor = engine.start(frontend="finishing")
    os.kill(engine.pid("frontend"), signal.SIGKILL)
    with pytest.raises(ProcessLost, match="^frontend was killed by signal 9"):
        supervisor.stop(600.0)


@pytest.mark.parametrize("restart", [False, True])
def test_what_ends_as_told_while_requests_finish_is_no_failure(engine: Engine, restart: bool):
    """Nor is it started again: whoever stops a group of processes signals all of them."""
    engine.server = dataclasses.replace(engine.server, restart=restart)
    supervisor = engine.start(frontend="finishing")
    os.kill(engine.pid("worker-0"), signal.SIGTERM)
    supervisor.stop(60.0)
    assert any("PeerFailed(process='worker-0'" in order for order in engine.orders())
    assert supervisor._restarts.count == 0


def test_a_process_that_freezes_while_it_loads_is_noticed(engine: Engine, monkeypatch):
    check = Supervisor._check_heartbeats

    def freeze_and_check(*arguments: object) -> None:
        if engine.waits_for("worker-0"):
            os.kill(engine.pid("worker-0"), signal.SIGSTOP)
            monkeypatch.setattr(supervision, "LOADING_SILENCE_S", 1.0)
        check(*arguments)

    monkeypatch.setattr(Supervisor, "_check_heartbeats", freeze_and_check)
    with pytest.raises(ProcessLost, match="^worker-0 does not respond: no heartbeat"):
        engine.start(worker="slow")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_ask_for_a_graceful_stop_and_two_for_an_immediate_one(engine: Engine, number: int, monkeypatch):
    supervisor = engine.start()
    os.kill(os.getpid(), number)
    with pytest.raises(StopRequested) as caught:
        engine.watch()
    assert caught.value.grace_s == 10.0
    monkeypatch.setattr(supervision, "FAILURE_NOTICE_S", 0.1)
    os.kill(engine.pid("frontend"), signal.SIGSTOP)  # it will not stop by itself
    os.kill(os.getpid(), number)
    supervisor.stop(600.0)


def test_a_second_signal_has_the_frontend_tell_its_clients_and_a_third_does_not_wait_for_it(engine: Engine):
    """It was killed at once, and whoever waited for an answer saw a connection that ended without one."""
    supervisor = engine.start(frontend="finishing")
    order, hurried = supervisor._order, []

    def signal_again(names, told) -> None:
        order(names, told)
        hurried.append((list(names), told))
        os.kill(os.getpid(), signal.SIGINT)

    supervisor._order = signal_again
    supervisor.stop(600.0)
    assert hurried == [(["frontend"], Stop(600_000)), (["frontend"], Stop(0))]


def test_the_end_of_the_parent_stops_the_engine(engine: Engine):
    read_fd, write_fd = os.pipe()
    config = EngineConfig(server=engine.server, run_dir=str(engine.run_dir.path))
    engine.supervisor = Supervisor(config, engine.run_dir, engine.wakeup, parent_fd=read_fd, rooms={})
    os.close(write_fd)
    with pytest.raises(StopRequested, match="the process that started this engine is gone"):
        engine.watch()
    os.close(read_fd)


def test_exit_is_seen_at_once_and_costs_no_more_turns(engine: Engine):
    supervisor = engine.start()
    os.kill(engine.pid("worker-0"), signal.SIGKILL)
    child = supervisor._peers["worker-0"].child
    while child.exit_fd in supervisor._exit_fds:
        supervisor._wait()
        supervisor._take_messages()
    assert child.ended()
    assert len(supervisor._exit_fds) == 2, "the ended child's descriptor is still waited for"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "/nowhere", "--port", "0"], "trireme: --model /nowhere: no such folder or .gguf file"),
        (["--port", "99999"], "trireme: --port is 99999; wanted 0 to 65535"),
        (["--once", " "], "trireme: --once: the prompt is empty"),
        (["sevre"], "trireme: unknown verb 'sevre'; wanted one of serve, status"),
        (["Qwen3-0.6B"], "or a hub id, which has its owner before the name, as Qwen/Qwen3-0.6B does"),
        (["keys"], "trireme: the following arguments are required: DIR"),
        (
            ["keys", "/nowhere", "alice", "--revoke", "bob"],
            "--revoke takes one name away; alice would be made",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, text, capfd, engine: Engine):
    assert launch.main(arguments) == 2
    assert text in capfd.readouterr().err.splitlines()[-1]


def test_an_interrupt_before_anything_runs_is_quiet(monkeypatch, capfd):
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.command.run", interrupted)
    assert launch.main([]) == 130
    assert capfd.readouterr().err == ""


def test_the_version_is_printed_and_nothing_started(capfd):
    assert launch.main(["--version"]) == 0
    assert capfd.readouterr() == (f"trireme {own_version()}\n", "")


def test_exit_codes_follow_the_error():
    assert [exit_code(kind("x")) for kind in (ConfigError, StartupError, EngineDeadError)] == [2, 3, 1]
    assert [exit_code(RequestError("x", status=status)) for status in (400, 404, 429, 503)] == [2, 2, 2, 1]


def test_a_missing_package_is_one_line():
    script = Path(launch.__file__)
    run = subprocess.run([sys.executable, "-S", script], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr == "trireme: the package setproctitle is missing: run pip install -e . first\n"


@pytest.mark.parametrize("word", ["default", "org/name", "./folder", "here", "missing.gguf", "--port", "status"])
def test_a_first_word_is_a_model_or_a_verb(word: str, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert command._is_verb(word) == (word == "status")
    assert command._is_verb("sttaus"), "a mistyped verb is told so, not looked for as a model"
