"""Traces of a running process: begun by options or orders, ended by their steps or an order."""

from pathlib import Path

import pytest

from common.config import ConfigError, EngineConfig, ProfilingOptions
from common.messages import Profile
from common.profiling import STEP_LIMIT, TRACING, StepTraces


class Tracers:
    """Plays tracers and the supervisor's link."""

    def __init__(self) -> None:
        self.started = 0
        self.paths: list[Path] = []
        self.states: list[str] = []
        self.error: OSError | None = None

    def set_state(self, state: str) -> None:
        self.states.append(state)

    def start(self) -> None:
        self.started += 1

    def stop(self, path: Path) -> None:
        if self.error:
            raise self.error
        self.paths.append(path)

    def __call__(self) -> "Tracers":
        return self


def make(tracers: Tracers, process: str = "worker-0", **options) -> StepTraces:
    return StepTraces(process, ProfilingOptions(**options), tracers, tracers)


def test_from_the_start_for_so_many_steps():
    tracers = Tracers()
    traces = make(tracers, profile="worker", profile_steps=3)
    assert (tracers.started, tracers.states) == (1, [TRACING])
    for _ in range(2):
        traces.step()
    assert tracers.paths == []
    for _ in range(5):
        traces.step()
    assert tracers.states == [TRACING, "serving"]
    [path] = tracers.paths
    assert path.parent == Path("profiles") and path.name.startswith("worker-0-") and path.suffix == ".json"


def test_another_process_is_not_traced():
    tracers = Tracers()
    make(tracers, profile="scheduler")
    assert tracers.started == 0


def test_by_order():
    tracers = Tracers()
    traces = make(tracers, profile_dir="here")
    traces.stop()
    traces.order(Profile("worker", 0))
    assert tracers.started == 0
    traces.order(Profile("worker", 10))
    traces.order(Profile("worker", 10))
    assert tracers.started == 1
    traces.step()
    traces.order(Profile("worker", 0))
    traces.order(Profile("worker", 0))
    assert len(tracers.paths) == 1
    traces.order(Profile("worker", 2**31 - 1))
    for _ in range(STEP_LIMIT):
        traces.step()
    assert len(tracers.paths) == 2


def test_without_a_folder_orders_do_nothing():
    tracers = Tracers()
    make(tracers).order(Profile("worker", 10))
    assert tracers.started == 0


def test_a_full_disk_costs_the_trace_alone(caplog):
    tracers = Tracers()
    tracers.error = OSError(28, "No space left on device")
    traces = make(tracers, profile="worker", profile_steps=1)
    traces.step()
    assert "No space left" in caplog.text
    assert tracers.states[-1] == "serving"


def test_no_steps_are_refused():
    with pytest.raises(ConfigError, match="--profile-steps is 0"):
        EngineConfig(profiling=ProfilingOptions(profile_steps=0))
