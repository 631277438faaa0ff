"""All exceptions of Trireme.

    TriremeError
    ├── ConfigError        an option or a model that cannot be served: start-up ends with one line and exit code 2
    ├── StartupError       a process failed to start or was not ready in time: exit code 3
    ├── WireError          bytes that are not a message of their socket: costs a client that one message; ends a process
    │                      that received them from another one of the engine, since their request would never end
    ├── RecordingError     a file that is no complete recording of the process it is to be replayed on: exit code 2
    ├── RequestError       a request that cannot be served as asked; `code`, `param` and `status` go to the client
    ├── AccessError        the engine's client socket does not accept these keys, or wants some
    └── EngineDeadError    a process of the engine is gone; every request in flight ends with this

A message says what was wanted, what came (`shown`), where, and what to do about it.
"""

import reprlib
from typing import Any

SHOWN_LIMIT = 80
"""Characters of a value in an error's text."""


class TriremeError(Exception):
    """Base of every exception that Trireme raises on purpose."""


class ConfigError(TriremeError):
    """The configuration, or the model it names, cannot be served."""


class StartupError(TriremeError):
    """A process failed to start, or was not ready by its deadline."""


class WireError(TriremeError):
    """Received bytes are not a message that this socket may carry."""


class RecordingError(TriremeError):
    """A file is not, or not all of, what `--record` wrote for this process."""


class RequestError(TriremeError):
    """A request that cannot be served as asked.

    Attributes:
        code: a short stable name such as `invalid_parameter`, `context_length_exceeded`, `queue_full`.
        param: the name of the parameter at fault, or None.
        status: the HTTP status that says the same (400, 404, 429, 503).
        retry_after_ms: when asking again makes sense, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_parameter",
        param: str | None = None,
        status: int = 400,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status
        self.retry_after_ms = retry_after_ms


class AccessError(TriremeError):
    """An engine does not let this client in, or is not the one that the client expects: their keys do not fit."""


class EngineDeadError(TriremeError):
    """A process of the engine died or hangs; the message names it and shows its last error."""


EXIT_CODES: dict[type[TriremeError], int] = {ConfigError: 2, RecordingError: 2, StartupError: 3}
"""What a process ends with when one of these ends it; 1 for every other error, and 2 for a request that is at fault."""


def exit_code(error: BaseException) -> int:
    """The exit code of a process that this error ends."""
    if isinstance(error, RequestError):
        return 2 if error.status < 500 else 1
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


def first_line(error: BaseException) -> str:
    """An error's name and what it says, without what torch adds below: advice, and where in C++ it was."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def shown(value: Any) -> str:
    """A value that came from outside as an error's text shows it: short, however long or deep it is."""
    if isinstance(value, bytes | bytearray | memoryview):
        value = bytes(value[:SHOWN_LIMIT])
    return _SHORT.repr(value)[:SHOWN_LIMIT]


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = SHOWN_LIMIT
