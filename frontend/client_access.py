"""Decides which clients may connect where the client socket has keys.

Answers the requests of ZeroMQ's authentication protocol (ZAP, RFC 27) about the client socket, on the frontend's loop.
A client may connect if its public key is in the folder of authorised keys, which is read again when it changes. Each of
the client's messages then carries its key (`key_of`), so that `ClientServer` can refuse a client whose key was removed
while it was connected.
"""

import logging
from pathlib import Path

import zmq
from zmq.utils import z85

from common.keys import AuthorisedKeys, server_keys
from frontend.zmq_reader import ZmqReader

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"
KNOWN_LIMIT = 1000
"""Refused keys that are remembered, so that a client that keeps trying is logged once."""

logger = logging.getLogger(__name__)


class ClientAccess:
    """Accepts clients by their keys, until `close`.

    Args:
        context: of the client socket.
        folder: of keys (`common.keys`).

    Attributes:
        server_keys: the engine's own.

    Raises:
        ConfigError: the folder does not contain the engine's keys, or has a file that is not a key.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path) -> None:
        self.server_keys = server_keys(folder)
        self._authorised = AuthorisedKeys(folder)
        self._refused: set[bytes] = set()
        self._socket = context.socket(zmq.REP)
        self._socket.bind(ENDPOINT)
        self._reader = ZmqReader(self._socket, self._answer)

    def allows(self, key: bytes) -> bool:
        """Whether a client with this public key (Z85) may send something."""
        return self._authorised.name_of(key) is not None

    def close(self) -> None:
        """Stop answering; to be called after the client socket is closed."""
        self._reader.close()
        self._socket.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        _, request_id, _, address, _, mechanism, *credentials = frames
        key = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        name = self._authorised.name_of(key)
        if name is None:
            self._log_refusal(key, address)
            reply = [b"400", b"this key is not authorised", b""]
        else:
            logger.info("the client %s connects from %s", name, address.decode(errors="replace"))
            reply = [b"200", b"OK", key]
        self._socket.send_multipart([VERSION, request_id, *reply, b""], zmq.NOBLOCK)

    def _log_refusal(self, key: bytes, address: bytes) -> None:
        if key not in self._refused and len(self._refused) < KNOWN_LIMIT:
            self._refused.add(key)
            shown = key.decode(errors="replace") or "none"
            logger.warning("refused a client at %s: its key %s is not authorised", address.decode("latin-1"), shown)


def key_of(frame: zmq.Frame) -> bytes:
    """The public key with which a message's sender was accepted; empty if none was required."""
    try:
        user_id = frame.get("User-Id")
    except zmq.ZMQError:  # it came through a listener without keys
        return b""
    return user_id.encode() if isinstance(user_id, str) else b""
