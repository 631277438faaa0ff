"""Recordings: all messages that a process received and sent, in a file, so that it can be run on them alone later.

With `--record DIR` each process writes `DIR/<process>.rec`, or `DIR/<session>/<process>.rec` if it was started again:
an eight-byte magic, a header, records, an end; numbers are little-endian.

    header   uint32 length, then a msgpack array [process, protocol version, monotonic ns, configuration as JSON]
    record   uint64 monotonic ns, uint8 link, uint8 direction, uint32 length, then that many bytes
    end      a record of link END

Besides messages, everything else is recorded that decides what a process does: the readings of its clocks, the turns of
its loop, the orders it got. API keys are left out of the configuration. Prompts and outputs are what a recording
consists of, so only its owner can read the files. Written by the processes' transports through `receiving` and
`sending`, read by each room's `replay`. Writing a message costs about a microsecond; when off, nothing is called.
"""

import dataclasses
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from common.config import EngineConfig, ProfilingOptions
from common.errors import ConfigError, RecordingError, WireError
from common.messages import PROTOCOL_VERSION
from common.wire import FieldReader, pack, unpack

MAGIC = b"TRIREC\x01\n"
SUFFIX = ".rec"
BUFFER_BYTES = 1 << 20
FLUSH_INTERVAL_NS = 500_000_000
"""How long records may lie in the buffer while others come: a killed process loses what does."""
_HEADER_CODE = 0
_LENGTH = struct.Struct("<I")
_RECORD = struct.Struct("<QBBI")
_READING = struct.Struct("<d")


class Link(IntEnum):
    """What a record is about: a link between processes, or something that a process alone knows."""

    END = 0
    REQUESTS = 1
    OUTPUTS = 2
    PLANS = 3
    RESULTS = 4
    ORDERS = 5
    TURN = 6  # the main loop has woken up; no bytes
    WALL_CLOCK = 7  # a reading, float64 seconds
    MONOTONIC_CLOCK = 8
    CALLS = 9  # what the frontend's clients want, on its way into the core
    EVENTS = 10  # what they get
    COMPILED = 11  # how many of the grammars that requests wait for are ready, as a reading


class Direction(IntEnum):
    """As the recording process sees it."""

    IN = 0
    OUT = 1


class Record(NamedTuple):
    """One record; `link` and `direction` are a Link and a Direction."""

    time_ns: int
    link: int
    direction: int
    data: bytes


class Recorder:
    """Writes one process's recording; may be called from several threads.

    Args:
        path: a file that does not exist yet.
        process: whose recording it is.
        config: the configuration it runs with.

    Raises:
        ConfigError: the file is there already, or cannot be made.
    """

    def __init__(self, path: Path, process: str, config: EngineConfig) -> None:
        check_new(path)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = path.open("xb", buffering=BUFFER_BYTES)
            path.chmod(0o600)
        except OSError as error:
            raise ConfigError(f"--record: cannot write {path}: {error.strerror}") from None
        server = dataclasses.replace(config.server, api_key=())
        text = dataclasses.replace(config, server=server).to_json()
        header = pack([_HEADER_CODE, process, PROTOCOL_VERSION, time.monotonic_ns(), text])
        self._file.write(MAGIC + _LENGTH.pack(len(header)) + header)
        self._file.flush()
        self._flushed_ns = time.monotonic_ns()

    def note(self, link: int, direction: int, data: bytes = b"") -> None:
        """Write one record; after `close` nothing."""
        if self._file.closed:
            return
        now_ns = time.monotonic_ns()
        # one write, so that the buffer's lock keeps records of two threads apart
        self._file.write(_RECORD.pack(now_ns, link, direction, len(data)) + data)
        if now_ns > self._flushed_ns + FLUSH_INTERVAL_NS:
            self._flushed_ns = now_ns
            self._file.flush()

    def received(self, link: int, data: bytes = b"") -> None:
        """A message, or something else that this process acts upon."""
        self.note(link, Direction.IN, data)

    def sent(self, link: int, data: bytes) -> None:
        """A message of this process."""
        self.note(link, Direction.OUT, data)

    def close(self) -> None:
        """Write the end; idempotent."""
        if not self._file.closed:
            self.note(Link.END, Direction.OUT)
            self._file.close()


def check_new(path: Path) -> None:
    """Refuse a recording's file that is there already, of a restarted process too; raises ConfigError."""
    if path.exists() or any(path.parent.glob(f"[0-9]*/{path.name}")):
        raise ConfigError(f"--record: {path} is there already; wanted a folder without a recording")


def recorder_for(config: EngineConfig, process: str) -> Recorder | None:
    """The process's recorder; None unless `--record` is given. That of a process that was started again writes into a
    folder of its own, named by the session: a recording holds one life of a process.

    Raises:
        ConfigError: its file is there already, or cannot be made.
    """
    if not config.profiling.record:
        return None
    folder = Path(config.profiling.record) / (str(config.session) if config.session else "")
    return Recorder(folder / (process + SUFFIX), process, config)


def receiving(recorder: Recorder | None, link: Link, receive: Callable[..., bytes]) -> Callable[..., bytes]:
    """A socket's `recv` that also records; `receive` itself when nothing is recorded."""
    if recorder is None:
        return receive
    received = recorder.received

    def record(*arguments: int) -> bytes:
        data = receive(*arguments)
        received(link, data)
        return data

    return record


def sending(recorder: Recorder | None, link: Link, send: Callable[..., object]) -> Callable[..., object]:
    """A socket's `send` that also records; `send` itself when nothing is recorded."""
    if recorder is None:
        return send
    sent = recorder.sent

    def record(data: bytes, *arguments: int) -> None:
        sent(link, data)
        send(data, *arguments)

    return record


def reading(recorder: Recorder | None, link: Link, clock: Callable[[], float]) -> Callable[[], float]:
    """A clock whose readings are recorded; `clock` itself when nothing is recorded."""
    if recorder is None:
        return clock
    received = recorder.received

    def record() -> float:
        now_s = clock()
        received(link, _READING.pack(now_s))
        return now_s

    return record


def reading_of(record: Record) -> float:
    """The seconds in a clock's record.

    Raises:
        RecordingError: it holds something else.
    """
    try:
        seconds: float = _READING.unpack(record.data)[0]
    except struct.error:
        raise RecordingError(f"a clock's record holds {len(record.data)} bytes; wanted {_READING.size}") from None
    return seconds


@dataclasses.dataclass(frozen=True)
class Recording:
    """What a file holds.

    Attributes:
        process: `frontend`, `scheduler`, `worker-0`.
        started_ns: the monotonic clock at its beginning.
        records: in the order they were written.
        breaks_off: the process was killed; something may have followed.
    """

    path: Path
    process: str
    started_ns: int
    config: EngineConfig
    records: list[Record]
    breaks_off: bool = False

    @classmethod
    def load(cls, folder: Path, process: str, *, partial: bool = False) -> "Recording":
        """Read a process's recording.

        Args:
            folder: the DIR of `--record`.
            process: whose.
            partial: take what is there of one that breaks off, as that of a killed process does.

        Raises:
            RecordingError: no such file, not a recording, another process's or version's, or one that breaks off.
        """
        path = folder / (process + SUFFIX)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RecordingError(f"cannot read {path}: {error.strerror}") from None
        if not data.startswith(MAGIC):
            raise RecordingError(f"{path} is no recording: it starts with {data[: len(MAGIC)]!r}, wanted {MAGIC!r}")
        view = memoryview(data)
        found, started_ns, config, start = _read_header(path, view)
        if found != process:
            raise RecordingError(f"{path} is a recording of {found}, wanted {process}")
        # a replay neither records nor traces itself
        config = dataclasses.replace(config, profiling=ProfilingOptions())
        records, is_whole = _read_records(view, start)
        if not (is_whole or partial):
            what = f"{path} breaks off after {len(view)} bytes: the process did not end as told"
            raise RecordingError(f"{what}; --partial takes what is there")
        return cls(path, process, started_ns, config, records, not is_whole)


def _read_header(path: Path, view: memoryview) -> tuple[str, int, EngineConfig, int]:
    """Process, start, configuration, and where the records begin."""
    start = len(MAGIC) + _LENGTH.size
    try:
        length = _LENGTH.unpack_from(view, len(MAGIC))[0]
        code, fields = unpack(view[start : start + length])
        with FieldReader("the header", fields) as read:
            process, version = read.text("process", 64), read.integer("protocol_version")
            if code != _HEADER_CODE or version != PROTOCOL_VERSION:
                raise RecordingError(f"{path} holds messages of protocol version {version}; this is {PROTOCOL_VERSION}")
            started_ns = read.integer("started_ns", 0, 2**63)
            config = EngineConfig.from_json(read.text("configuration"))
    except (struct.error, WireError, ConfigError) as error:
        raise RecordingError(f"{path}: the header cannot be read: {error}") from None
    return process, started_ns, config, start + length


def _read_records(view: memoryview, start: int) -> tuple[list[Record], bool]:
    """The records from `start` on, and whether their end is there."""
    records: list[Record] = []
    while start + _RECORD.size <= len(view):
        time_ns, link, direction, length = _RECORD.unpack_from(view, start)
        start += _RECORD.size
        if link == Link.END:
            return records, True
        if start + length > len(view):
            break
        records.append(Record(time_ns, link, direction, bytes(view[start : start + length])))
        start += length
    return records, False
