"""Recordings as files: what is written is read again, and whatever else is refused in one line."""

import stat

import pytest

from common.config import EngineConfig, ProfilingOptions, ServerOptions
from common.errors import ConfigError, RecordingError
from common.messages import PROTOCOL_VERSION
from common.recording import (
    MAGIC,
    Direction,
    Link,
    Recorder,
    Recording,
    reading,
    reading_of,
    receiving,
    recorder_for,
    sending,
)

CONFIG = EngineConfig(server=ServerOptions(api_key=("sesame",), port=7), profiling=ProfilingOptions(record="elsewhere"))

VERSION = b"\xa9scheduler" + bytes([PROTOCOL_VERSION])


@pytest.fixture
def recorded(tmp_path):
    """A folder with the recording of a scheduler."""
    recorder = Recorder(tmp_path / "scheduler.rec", "scheduler", CONFIG)
    sent = []
    assert receiving(recorder, Link.REQUESTS, lambda *flags: b"in" + bytes(flags))(1) == b"in\x01"
    sending(recorder, Link.PLANS, sent.append)(b"out")
    assert reading(recorder, Link.WALL_CLOCK, lambda: 1.25)() == 1.25
    recorder.received(Link.TURN)
    recorder.close()
    recorder.received(Link.TURN)  # after the end: nothing
    assert sent == [b"out"]
    return tmp_path


def test_what_is_written_is_read(recorded):
    recording = Recording.load(recorded, "scheduler")
    assert [(r.link, r.direction, r.data) for r in recording.records[:2]] == [
        (Link.REQUESTS, Direction.IN, b"in\x01"),
        (Link.PLANS, Direction.OUT, b"out"),
    ]
    assert reading_of(recording.records[2]) == 1.25
    assert [r.link for r in recording.records[3:]] == [Link.TURN]
    times = [recording.started_ns, *(r.time_ns for r in recording.records)]
    assert times == sorted(times)
    assert recording.config.server.port == 7 and not recording.breaks_off
    assert not recording.config.profiling.record, "a replay must not record"
    with pytest.raises(RecordingError, match="wanted 8"):
        reading_of(recording.records[0])


def test_a_killed_process_loses_only_the_last_moments(tmp_path, monkeypatch):
    monkeypatch.setattr("common.recording.FLUSH_INTERVAL_NS", 2**62)
    recorder = Recorder(tmp_path / "scheduler.rec", "scheduler", CONFIG)
    recorder.received(Link.PLANS, b"lost")
    assert Recording.load(tmp_path, "scheduler", partial=True).records == []
    monkeypatch.setattr("common.recording.FLUSH_INTERVAL_NS", 0)
    recorder.received(Link.PLANS, b"kept")
    assert [r.data for r in Recording.load(tmp_path, "scheduler", partial=True).records] == [b"lost", b"kept"]
    recorder.close()


def test_nobody_else_reads_it_and_it_holds_no_keys(recorded):
    path = recorded / "scheduler.rec"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"sesame" not in path.read_bytes()


def test_off_is_nothing_in_between():
    def function(*_: object) -> bytes:
        return b""

    assert receiving(None, Link.PLANS, function) is function
    assert sending(None, Link.PLANS, function) is function
    assert recorder_for(EngineConfig(), "scheduler") is None


def test_an_old_recording_is_never_overwritten(recorded):
    config = EngineConfig(profiling=ProfilingOptions(record=str(recorded)))
    with pytest.raises(ConfigError, match="is there already"):
        recorder_for(config, "scheduler")
    (recorded / "file").write_text("")
    with pytest.raises(ConfigError, match="--record: cannot write"):
        Recorder(recorded / "file" / "scheduler.rec", "scheduler", config)


def test_one_that_breaks_off_anywhere_is_refused_or_read_in_part(recorded):
    path = recorded / "scheduler.rec"
    whole, data = Recording.load(recorded, "scheduler"), path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(RecordingError) as refused:
            Recording.load(recorded, "scheduler")
        assert "\n" not in str(refused.value)
    for length in range(data.index(b"in\x01"), len(data)):
        path.write_bytes(data[:length])
        part = Recording.load(recorded, "scheduler", partial=True)
        assert part.records == whole.records[: len(part.records)] and part.breaks_off


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: b"", "is no recording"),
        (lambda data: b"GIF89a" + data, "is no recording"),
        (lambda data: MAGIC + b"\xff\xff\xff\x7f" + data, "header cannot be read"),
        (lambda data: data.replace(b"scheduler", b"frontend\0", 1), "wanted scheduler"),
        (lambda data: data.replace(b'"block_size"', b'"block_sort"', 1), "header cannot be read: unknown"),
        (lambda data: data.replace(VERSION, VERSION[:-1] + b"\x63", 1), "protocol version 99"),
    ],
)
def test_foreign_files_are_refused(recorded, change, text):
    path = recorded / "scheduler.rec"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RecordingError, match=text):
        Recording.load(recorded, "scheduler")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(RecordingError, match=r"cannot read .*worker-0\.rec: No such file"):
        Recording.load(tmp_path, "worker-0")
