"""TCP ports for servers that a test starts."""

import contextlib
import socket
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system gives nobody else meanwhile, and that whoever names it can serve on.

    It is bound without being listened at: with SO_REUSEADDR, as our servers have it, Linux lets others bind it too.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            holder.close()
        yield port
