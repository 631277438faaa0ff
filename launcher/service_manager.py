"""Tells whoever runs the engine as a service how far it is, in systemd's protocol (sd_notify(3)).

One datagram for each change, to the socket that `NOTIFY_SOCKET` names; nothing where there is none. Called by
`launcher.serve`. Knows nothing of what it tells.
"""

import contextlib
import os
import socket

READY = "READY=1"
STOPPING = "STOPPING=1"


def tell_service_manager(*changes: str, status: str) -> None:
    """Send a change of state, such as `READY`, and a line for people, which `systemctl status` shows.

    Whatever prevents it is passed over: an engine that serves unnoticed is better than none.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # of Linux's abstract names, which have no file
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as door:
        door.setblocking(False)
        door.sendto("\n".join([*changes, f"STATUS={status}"]).encode(), address)
