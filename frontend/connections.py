"""Limits how many clients may be connected at once, over HTTP and the client socket together.

Each connection takes a file descriptor, and ZeroMQ aborts a process that has none left. So some are reserved for
everything else, and clients beyond that are refused: by the HTTP protocol, and by the client socket in answer to Hello.
`client_monitor` deals with those that stay connected all the same. Both count their connections here, in one object per
frontend.
"""

import resource

from common.errors import RequestError

RESERVED_FILES = 512
"""File descriptors that clients leave to everything else, half of them at most."""


class Connections:
    """The connections that are open.

    Args:
        limit: how many there may be.
        tolerance: how many more are tolerated, since a refused client needs a moment to leave.

    Attributes:
        http_count, client_count: over HTTP, and over the client socket.
    """

    def __init__(self, limit: int, tolerance: int) -> None:
        self.limit, self.tolerance = limit, tolerance
        self.http_count = 0
        self.client_count = 0

    @classmethod
    def allowed(cls) -> "Connections":
        """A limit that follows from this process's limit of open files."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files == resource.RLIM_INFINITY:
            return cls(1 << 30, RESERVED_FILES)
        reserved = min(RESERVED_FILES, files // 2)
        return cls(files - reserved, reserved // 2)

    @property
    def excess(self) -> int:
        """How many there are beyond the limit; negative while more may come."""
        return self.http_count + self.client_count - self.limit

    def check(self) -> None:
        """Refuse the newest connection if it is one too many.

        Raises:
            RequestError: `too_many_connections` (503).
        """
        if self.excess > 0:
            text = f"{self.limit} connections are open, as many as the limit of open files (ulimit -n) allows"
            raise RequestError(text, code="too_many_connections", status=503)
