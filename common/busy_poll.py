"""Busy polling: after a message a loop asks for the next one again and again, for a few milliseconds, before it sleeps.

On a host whose processors sleep while they have nothing to do, a thread takes tens of microseconds to wake up, and a
request's way has six messages. A loop that asks does not have to be woken; ZeroMQ's own threads still do, unless they
are kept awake too (`Errands`).

The price is a processor for each loop of an engine that is at work, and as many for ZeroMQ's threads, so both are on
by default only where there are many (`limit_s_for`, `is_io_kept_awake`). Used by all processes and by the client SDK;
knows no messages.
"""

import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable

import zmq

from common.config import BUSY_POLL_AUTOMATIC, BUSY_POLL_IO, EngineConfig, check_busy_poll_ms
from common.errors import ConfigError
from common.processors import granted_cores, has_gpu
from common.sockets import EVENTS, NO_WAIT, READABLE, bind_pull, connect_push

AUTOMATIC_MS = 5.0
LEAST_CPUS = 8
"""From here on there is one for each loop of an engine, and as many for what else they do."""
LEAST_IO_CPUS = 16
"""From here on there is one for each of ZeroMQ's threads beside them too."""
CONTESTED_S = 0.0005
"""A turn in which others had this processor for longer: somebody else has work for it."""
PAUSE_S = 0.1
"""How long not to poll after that."""


def limit_s_for(option_ms: float, device: str = "auto") -> float:
    """How long after a message to ask for the next one, in seconds; 0 for not at all.

    Args:
        option_ms: `--busy-poll-ms`. If that is BUSY_POLL_AUTOMATIC: AUTOMATIC_MS with a GPU and at least LEAST_CPUS
            processors, otherwise 0. (A worker on the CPU needs every processor for itself, and its steps take longer.)
        device: `--device`.

    Raises:
        ConfigError: neither BUSY_POLL_AUTOMATIC nor milliseconds that are allowed.
    """
    check_busy_poll_ms("busy_poll_ms", option_ms)
    if option_ms != BUSY_POLL_AUTOMATIC:
        return option_ms / 1000
    is_worth_it = device != "cpu" and has_gpu() and granted_cores() >= LEAST_CPUS
    return AUTOMATIC_MS / 1000 if is_worth_it else 0.0


def is_io_kept_awake(option: str, option_ms: float, device: str = "auto") -> bool:
    """Whether ZeroMQ's own threads are kept awake while a loop asks.

    Args:
        option: `--busy-poll-io`: `always`, `never`, or `auto`: where polling has been left to the machine and is on,
            and there are at least LEAST_IO_CPUS processors.
        option_ms: `--busy-poll-ms`.
        device: `--device`.

    Raises:
        ConfigError: another option.
    """
    if option not in BUSY_POLL_IO:
        raise ConfigError(f"busy_poll_io is {option!r}; wanted one of {', '.join(BUSY_POLL_IO)}")
    if option != "auto":
        return option == "always"
    is_automatic = option_ms < 0 and limit_s_for(option_ms, device) > 0
    return is_automatic and granted_cores() >= LEAST_IO_CPUS and sys.platform == "linux"


class Errands:
    """Keeps a context's ZeroMQ thread awake: it always has one more empty message to carry from here to here.

    Linux only: the socket has a name and no file. Used by the thread that made it.

    Args:
        context: whose thread.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        endpoint = f"ipc://@trireme-errands-{secrets.token_hex(16)}"  # containers may share names, and not process ids
        self._pull = bind_pull(context, endpoint)
        self._push = connect_push(context, endpoint)
        self._push.send(b"", NO_WAIT)

    def send(self) -> None:
        """Send the message on its way again if it has arrived."""
        if int(self._pull.get(EVENTS)) & READABLE:
            self._pull.recv(NO_WAIT)
            self._push.send(b"", NO_WAIT)

    def close(self) -> None:
        """Close the sockets, before their context ends."""
        self._pull.close(linger=0)
        self._push.close(linger=0)


class BusyPoll:
    """When a loop asks again, and when it sleeps.

    A loop that waits in ZeroMQ's poll calls `poll`; another one calls `turn` whenever it has asked in vain. Both say
    `note` for a message that is part of a request.

    Args:
        limit_s: how long to ask after a message; 0 for not at all.
        alone: held while asking, by one loop of a process at a time; the others sleep.
        clock: monotonic seconds.

    Attributes:
        errands: keep ZeroMQ's thread awake while asking; None leaves it alone.
    """

    def __init__(
        self, limit_s: float, alone: "threading.Lock | None" = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_s = limit_s
        self._alone = alone or threading.Lock()
        self._clock = clock
        self._until_s = self._paused_until_s = -math.inf
        self.errands: Errands | None = None

    def keep_awake(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """While asking, keep the context's own thread awake as well, which takes another processor."""
        if self.limit_s:
            self.errands = Errands(context)

    def close(self) -> None:
        """Close what `keep_awake` has opened, before the context ends."""
        if self.errands is not None:
            self.errands.close()
            self.errands = None

    def note(self) -> bool:
        """A message has come or gone; whether to ask for the next one."""
        if not self.limit_s or (now_s := self._clock()) < self._paused_until_s:
            return False
        self._until_s = now_s + self.limit_s
        return True

    def turn(self) -> bool:
        """Nothing was there: whether to ask again at once. Gives way to other threads first."""
        start_s = self._clock()
        if start_s >= self._until_s:
            return False
        if self.errands is not None:
            self.errands.send()
        os.sched_yield()
        end_s = self._clock()
        if end_s - start_s > CONTESTED_S:
            self._until_s, self._paused_until_s = -math.inf, end_s + PAUSE_S
        return end_s < self._until_s

    def poll(self, poller: zmq.Poller, timeout_ms: float | None = None) -> "list[tuple[object, int]]":
        """What the poller finds, as its own `poll`; an empty list after the timeout. None waits for ever."""
        start_s = self._clock()
        left_ms = math.inf if timeout_ms is None else timeout_ms
        if start_s < self._until_s and self._alone.acquire(blocking=False):
            end_s = start_s + left_ms / 1000
            try:
                found = poller.poll(0)
                while not found and self._clock() < end_s and self.turn():
                    found = poller.poll(0)
            finally:
                self._alone.release()
            left_ms = (end_s - self._clock()) * 1000
            if found or left_ms <= 0:
                return found
        return poller.poll(None if left_ms == math.inf else math.ceil(left_ms))


def of_client_beside(config: EngineConfig) -> tuple[float, str]:
    """`busy_poll_ms` and `busy_poll_io` of a client that waits as the processes of the engine on this machine do."""
    server, device = config.server, config.model.device
    is_awake = is_io_kept_awake(server.busy_poll_io, server.busy_poll_ms, device)
    return limit_s_for(server.busy_poll_ms, device) * 1000, "always" if is_awake else "never"


def of_engine(config: EngineConfig, context: "zmq.Context[zmq.Socket[bytes]]") -> BusyPoll:
    """How a process of an engine asks, as its options have it.

    Args:
        context: the process's.
    """
    server, device = config.server, config.model.device
    busy = BusyPoll(limit_s_for(server.busy_poll_ms, device))
    if is_io_kept_awake(server.busy_poll_io, server.busy_poll_ms, device):
        busy.keep_awake(context)
    return busy
