"""Logging to stderr: one line per event, with the process's name and, where there is one, the request's id.

Every process calls `set_up` once. The request id is in a context variable, so code deep inside a request need not pass
it on.
"""

import json
import logging
import sys
from contextvars import ContextVar

request_id_var: ContextVar[str] = ContextVar("request_id", default="")


def set_up(process: str, level: str = "info", form: str = "text") -> None:
    """Send this process's log lines to stderr.

    Args:
        process: the name that every line carries.
        level: `debug`, `info`, `warning` or `error`.
        form: `text` for people, `json` for machines.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if form == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


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
