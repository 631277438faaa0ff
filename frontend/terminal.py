"""The command-line verbs that talk to a running engine: `status`, `chat` and `stop` of `launch.py`.

What status prints is in `terminal_status`, the chat in `terminal_chat`; everything goes through the SDK's `Client`, and
engines are found by their run directories.
"""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from common.cli import program_name
from common.errors import ConfigError
from common.run_dir import Instance, instances
from frontend.client import Client
from frontend.terminal_chat import ANSWER_TOKENS, Chat
from frontend.terminal_status import show


def run(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb; returns the exit code.

    Raises:
        ConfigError: bad arguments, or no engine that they could mean.
    """
    parser = _Parser(prog=f"{program_name()} {verb}", allow_abbrev=False)
    parser.add_argument("--pid", type=int, help="the supervisor's process id, if several engines run")
    if verb == "chat":
        parser.add_argument("--client-endpoint", default="", help="endpoint of an engine that was not started here")
        parser.add_argument("--server-key", default=None, help="its public key, or the file; for an engine with keys")
        parser.add_argument("--client-keys", default=None, help="the file with the secret key to show it")
        parser.add_argument("--temperature", type=float, default=None, help="0 is greedy")
        parser.add_argument("--max-tokens", type=int, default=ANSWER_TOKENS, help="tokens of an answer at most")
        parser.add_argument("--system", default="", help="a system message to begin with")
    elif verb == "status":
        parser.add_argument("--watch", action="store_true", help="look again every second until Ctrl-C")
        parser.add_argument("--json", action="store_true", help="a JSON object for each engine, a line each")
    parsed = parser.parse_args(arguments)
    if verb == "status":
        return show(meant(instances(), parsed.pid), watch=parsed.watch, as_json=parsed.json)
    if verb == "stop":
        return stop(choose(instances(), parsed.pid))
    endpoint = parsed.client_endpoint or client_endpoint(choose(instances(), parsed.pid))
    params: dict[str, Any] = {"max_tokens": parsed.max_tokens}
    if parsed.temperature is not None:
        params["temperature"] = parsed.temperature
    with Client(endpoint, server_key=parsed.server_key, client_keys=parsed.client_keys) as client:
        return Chat(client, params, parsed.system).run()


def meant(running: Sequence[Instance], pid: int | None) -> list[Instance]:
    """The engines that may be meant: all, or the named one; raises ConfigError if there is none."""
    found = [instance for instance in running if pid in (None, instance.pid)]
    if not found:
        raise ConfigError("no engine of yours is running" + (f" with process id {pid}" if pid is not None else ""))
    return found


def choose(running: Sequence[Instance], pid: int | None) -> Instance:
    """The one engine that is meant.

    Raises:
        ConfigError: none runs, or several do and none was named.
    """
    running = meant(running, pid)
    if len(running) > 1:
        pids = ", ".join(str(instance.pid) for instance in running)
        raise ConfigError(f"{len(running)} engines are running; choose with --pid, one of {pids}")
    return running[0]


def client_endpoint(instance: Instance) -> str:
    """Where to reach an engine; raises ConfigError while it is still starting."""
    if not instance.ready:
        raise ConfigError(f"the engine with process id {instance.pid} is still starting")
    return str(instance.ready["local_endpoint"])


def stop(instance: Instance) -> int:
    """Ask an engine to stop, and wait until it has."""
    try:
        fd = os.pidfd_open(instance.pid)
    except ProcessLookupError:
        return 0
    try:
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        print(f"stopping the engine with process id {instance.pid}", file=sys.stderr)
        select.select([fd], [], [])
    except ProcessLookupError:  # it has just ended by itself
        pass
    finally:
        os.close(fd)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
