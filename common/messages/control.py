"""Messages between the supervisor and its children: heartbeats up, orders down; `Profile` goes both ways."""

from dataclasses import dataclass
from typing import Any, ClassVar

from common.wire import FieldReader, pack


@dataclass(frozen=True)
class Heartbeat:
    """A process is alive; sent by a thread of its own, so it says nothing of the main loop, which that thread watches.

    Attributes:
        progress: counts the main loop's steps or messages.
    """

    CODE: ClassVar[int] = 40
    process: str
    state: str
    progress: int

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.process, self.state, self.progress])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Heartbeat":
        """Build from raw fields; raises WireError."""
        with FieldReader("Heartbeat", fields) as read:
            return cls(read.text("process", 64), read.text("state", 64), read.integer("progress", 0, 2**53))


@dataclass(frozen=True)
class Ready:
    """A process can serve; `detail` is shown to the operator (endpoints, device, what took how long)."""

    CODE: ClassVar[int] = 41
    process: str
    detail: str

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.process, self.detail])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Ready":
        """Build from raw fields; raises WireError."""
        with FieldReader("Ready", fields) as read:
            return cls(read.text("process", 64), read.text("detail", 4096))


@dataclass(frozen=True)
class Failed:
    """A process's last message: the one line that says why it ends."""

    CODE: ClassVar[int] = 42
    process: str
    message: str

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.process, self.message])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Failed":
        """Build from raw fields; raises WireError."""
        with FieldReader("Failed", fields) as read:
            return cls(read.text("process", 64), read.text("message", 1 << 16))


@dataclass(frozen=True)
class Stop:
    """End the run: refuse new work, finish what is in flight within `grace_ms`, end the rest, exit."""

    CODE: ClassVar[int] = 50
    grace_ms: int

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.grace_ms])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Stop":
        """Build from raw fields; raises WireError."""
        with FieldReader("Stop", fields) as read:
            return cls(read.integer("grace_ms"))


@dataclass(frozen=True)
class PeerFailed:
    """Another process of the engine is gone: end every request in flight with this error, then exit."""

    CODE: ClassVar[int] = 51
    process: str
    message: str

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.process, self.message])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "PeerFailed":
        """Build from raw fields; raises WireError."""
        with FieldReader("PeerFailed", fields) as read:
            return cls(read.text("process", 64), read.text("message", 1 << 16))


@dataclass(frozen=True)
class Profile:
    """Trace the next steps of a process: asked for by the frontend, passed on by the supervisor.

    Attributes:
        process: `frontend`, `scheduler`, or `worker` for all workers.
        step_count: how many; 0 ends the trace that runs.
    """

    CODE: ClassVar[int] = 52
    process: str
    step_count: int

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.process, self.step_count])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "Profile":
        """Build from raw fields; raises WireError."""
        with FieldReader("Profile", fields) as read:
            return cls(read.text("process", 64), read.integer("step_count"))


@dataclass(frozen=True)
class NewSession:
    """The process at the other end of this one's links is lost and is being started again (`--restart`).

    What was under way with the lost one is settled by the receiver: the frontend goes on with its requests once the new
    scheduler says that it is ready; the scheduler forgets those of the lost frontend. From now on the two talk over the
    sockets of the new session (`EngineConfig.endpoint`), where nothing of the old one can turn up.

    Attributes:
        process: who is lost; message: how it ended.
        session: counts up with each restart.
    """

    CODE: ClassVar[int] = 53
    process: str
    message: str
    session: int

    def to_wire(self) -> bytes:
        """The message as msgpack bytes."""
        return pack([self.CODE, self.process, self.message, self.session])

    @classmethod
    def from_fields(cls, fields: list[Any]) -> "NewSession":
        """Build from raw fields; raises WireError."""
        with FieldReader("NewSession", fields) as read:
            return cls(read.text("process", 64), read.text("message", 1 << 16), read.integer("session", 1))
