"""Logging to stderr: one line per event, with the process's name and, where there is one, the request's id.

Every process calls `set_up` once. The request id is in a context variable, so code deep inside a request need not pass
it on. Where lines are JSON objects, every line on stderr is one: what is said beside the log goes by `say`, and what a
child writes by itself, such as a traceback, becomes one on its way through its parent (`ForeignLines`).
"""

import json
import logging
import re
import sys
import time
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

request_id_var: ContextVar[str] = ContextVar("request_id", default="")

PROGRAM = "trireme: "
"""What a plain line that is not of the log begins with."""
LINE_LIMIT_BYTES = 65_536
"""A line that is longer is cut."""
STACK_LIMIT_LINES = 1_000
"""So is a stack."""
_STACK = re.compile(rb".*\(most recent call (first|last)\):")
"""The line before a stack's; what is indented belongs to it, and so does the line after that of a traceback."""

_objects = SimpleNamespace(process="")
"""This process's name, if its lines are JSON objects."""


def set_up(process: str, level: str = "info", form: str = "text") -> None:
    """Send this process's log lines to stderr.

    Args:
        process: the name that every line carries.
        level: `debug`, `info`, `warning` or `error`.
        form: `text` for people, `json` for machines.
    """
    _objects.process = process if form == "json" else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def is_json() -> bool:
    """Whether this process's lines are JSON objects."""
    return bool(_objects.process)


def say(text: str, level: str = "info", prefix: str = "") -> None:
    """Write a line to stderr that is for people, whatever the log's level; as an object where the log has those.

    Args:
        text: one line.
        level: the object's.
        prefix: what the plain line begins with.
    """
    line = json.dumps(_entry(_objects.process, level, text)) if is_json() else prefix + text
    print(line, file=sys.stderr, flush=True)


def said(line: str) -> str:
    """The message of a line of stderr, in either form, without what a plain one begins with."""
    message = _object_of(line).get("message")
    return message if isinstance(message, str) else line.removeprefix(PROGRAM)


class ForeignLines:
    """Makes JSON objects of what a child writes to its stderr; lines that are objects already stay as they are.

    Args:
        process: the child's name.
    """

    def __init__(self, process: str) -> None:
        self._process = process
        self._rest = b""
        self._stack: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """Take bytes; returns the objects of the lines that they complete."""
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > LINE_LIMIT_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        return b"".join(self._take(line) for line in lines if line.strip())

    def end(self) -> bytes:
        """The objects of what waits; there will be no more."""
        rest = self.feed(b"\n")
        return rest + self._end_stack()

    def _take(self, line: bytes) -> bytes:
        if self._stack and len(self._stack) < STACK_LIMIT_LINES:
            if line[:1].isspace():
                self._stack.append(line)
                return b""
            if b"(most recent call last)" in self._stack[0] and not _object_of(line):
                self._stack.append(line)
                return self._end_stack()
        done = self._end_stack()
        if _STACK.match(line):
            self._stack = [line]
            return done
        if _object_of(line):
            return done + line + b"\n"
        text = line.decode(errors="replace").strip()
        level = "error" if text.startswith((PROGRAM, "Fatal Python error")) else "info"
        return done + self._object(level, text.removeprefix(PROGRAM))

    def _end_stack(self) -> bytes:
        lines, self._stack = [line.decode(errors="replace") for line in self._stack], []
        if not lines:
            return b""
        message = lines[0] if lines[-1][:1].isspace() else lines[-1]
        return self._object("error", message, traceback="\n".join(lines))

    def _object(self, level: str, message: str, **more: str) -> bytes:
        return json.dumps(_entry(self._process, level, message) | more).encode() + b"\n"


def _object_of(line: str | bytes) -> dict[str, Any]:
    """The JSON object that a line is; an empty one for any other line, whatever a child may have written.

    Stricter than `json`, which takes UTF-16 and numbers that JSON does not have: other readers would fail at the line.
    """
    try:
        entry = json.loads(line if isinstance(line, str) else line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        entry = None
    return entry if isinstance(entry, dict) else {}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _entry(process: str, level: str, message: str) -> dict[str, Any]:
    return {"time": time.time(), "level": level, "process": process, "logger": "stderr", "message": message}


class TextFormatter(logging.Formatter):
    """`12:00:01.123 INFO  scheduler  message  [request]`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line (and its traceback, if it has one)."""
        time = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d}"
        request = request_id_var.get()
        line = f"{time} {record.levelname:<7} {self._process:<10} {record.getMessage()}"
        if request:
            line += f"  [{request}]"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, process, logger, message, request id, traceback.

    What a record carries as `extra={"fields": {...}}` joins them.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record as one JSON object."""
        entry = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := request_id_var.get():
            entry["request_id"] = request
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)
