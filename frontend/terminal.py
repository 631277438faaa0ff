"""The command-line verbs that talk to a running engine: `status`, `chat` and `stop` of `launch.py`.

What status prints is in `terminal_status`, the chat in `terminal_chat`; everything goes through the SDK's `Client`, and
engines are found by their run directories.
"""

import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any

from common.cli import VerbParser, program_name
from common.errors import ConfigError
from common.run_dir import Instance, instances
from frontend.client import Client
from frontend.terminal_chat import ANSWER_TOKENS, Chat, note
from frontend.terminal_status import show

DESCRIPTIONS = {
    "status": "Show how your engines on this machine are: state, requests, KV cache, speed, the parts of a step.",
    "stop": "End an engine: requests in flight get its --shutdown-timeout. Returns when it has ended.",
    "chat": "Talk to the model of a running engine; /help inside lists the commands. Answers go to stdout.",
}


def run(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb; returns the exit code.

    Raises:
        ConfigError: bad arguments, or no engine that they could mean.
    """
    parsed = _parser(verb).parse_args(arguments)
    if verb == "status":
        return show(meant(instances(), parsed.pid), watch=parsed.watch, as_json=parsed.json)
    if verb == "stop":
        return stop(choose(instances(), parsed.pid))
    endpoint = parsed.client_endpoint or client_endpoint(choose(instances(), parsed.pid))
    if parsed.client_endpoint:  # there may be nobody, which takes its time to tell
        note(f"connecting to {endpoint}; Ctrl-C gives up")
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


def _parser(verb: str) -> VerbParser:
    parser = VerbParser(prog=f"{program_name()} {verb}", description=DESCRIPTIONS[verb])
    parser.add_argument("--pid", type=int, metavar="N", help="the supervisor's process id, if several engines run")
    if verb == "chat":
        parser.add_argument("--client-endpoint", metavar="ENDPOINT", default="",
                            help="of an engine that was not started here, such as tcp://HOST:5555")  # fmt: skip
        parser.add_argument("--server-key", metavar="KEY", help="its public key, or the file; for an engine with keys")
        parser.add_argument("--client-keys", metavar="FILE", help="the file with the secret key to show it")
        parser.add_argument("--temperature", type=float, metavar="N", help="0 is greedy (default: the model's)")
        parser.add_argument("--max-tokens", type=int, metavar="N", default=ANSWER_TOKENS,
                            help=f"tokens of an answer at most (default: {ANSWER_TOKENS})")  # fmt: skip
        parser.add_argument("--system", metavar="TEXT", default="", help="a system message to begin with")
    elif verb == "status":
        parser.add_argument("--watch", action="store_true", help="look again every second until Ctrl-C")
        parser.add_argument("--json", action="store_true", help="a JSON object for each engine, a line each")
    return parser
