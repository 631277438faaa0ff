"""What people do with a running engine from a terminal: look at it, talk to it, end it.

The verbs `status`, `chat` and `stop` of `launch.py`, and the one answer of `--once`. Everything goes through the SDK's
`Client`; engines are found by their run directories.
"""

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from common.errors import ConfigError, TriremeError
from common.run_dir import Instance, instances
from frontend.client import Client

ANSWER_TOKENS = 512
STATUS_TIMEOUT_S = 3.0
ONCE_PARAMS = {"seed": 7, "max_tokens": ANSWER_TOKENS}
"""The model's own sampling defaults, and a seed, so that the same question gets the same answer."""

Messages = list[dict[str, str]]


def run(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb; returns the exit code.

    Raises:
        ConfigError: bad arguments, or no engine that they could mean.
    """
    parser = _Parser(prog=f"launch.py {verb}", allow_abbrev=False)
    parser.add_argument("--pid", type=int, help="the supervisor's process id, if several engines run")
    if verb == "chat":
        parser.add_argument("--client-endpoint", default="", help="endpoint of an engine that was not started here")
        parser.add_argument("--server-key", default=None, help="its public key, or the file; for an engine with keys")
        parser.add_argument("--client-keys", default=None, help="the file with the secret key to show it")
        parser.add_argument("--temperature", type=float, default=None, help="0 is greedy")
        parser.add_argument("--max-tokens", type=int, default=ANSWER_TOKENS, help="tokens of an answer at most")
    parsed = parser.parse_args(arguments)
    if verb == "status":
        return status(meant(instances(), parsed.pid))
    if verb == "stop":
        return stop(choose(instances(), parsed.pid))
    endpoint = parsed.client_endpoint or client_endpoint(choose(instances(), parsed.pid))
    params: dict[str, Any] = {"max_tokens": parsed.max_tokens}
    if parsed.temperature is not None:
        params["temperature"] = parsed.temperature
    with Client(endpoint, server_key=parsed.server_key, client_keys=parsed.client_keys) as client:
        return chat(client, params)


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


def status(running: Sequence[Instance]) -> int:
    """Print how these engines are; returns 1 if one does not answer."""
    return max([_print_status(instance) for instance in running])


def _print_status(instance: Instance) -> int:
    ready = instance.ready
    if not ready:
        print(f"pid {instance.pid}: starting")
        return 0
    print(f"pid {instance.pid}: {ready['model']}, up {_duration(time.time() - ready['ready_at_s'])}")
    print(f"  HTTP    {ready['http'] or 'off'}\n  client  {ready['client_endpoint']}")
    try:
        with Client(ready["local_endpoint"], timeout_s=STATUS_TIMEOUT_S) as client:
            reply = client.status()
    except (TriremeError, TimeoutError) as error:
        print(f"  state   does not answer: {error}")
        return 1
    figures = reply.figures
    print(f"  state   {reply.state}{': ' + reply.detail if reply.detail else ''}")
    if figures:
        print(f"  now     {figures['running_count']} running, {figures['waiting_count']} waiting")
        print(f"  blocks  {figures['free_block_count']} free, {figures['cached_block_count']} cached, ", end="")
        print(f"{figures['total_block_count']} in all")
        print(f"  since   {figures['prompt_tokens']} tokens in, {figures['output_tokens']} out, ", end="")
        print(f"{figures['prefix_hit_tokens']} from the prefix cache, {figures['preemptions']} preemptions")
    return 0


def stop(instance: Instance) -> int:
    """Ask an engine to stop, and wait until it has."""
    try:
        fd = os.pidfd_open(instance.pid)
        os.kill(instance.pid, signal.SIGTERM)
    except ProcessLookupError:
        return 0
    print(f"stopping the engine with process id {instance.pid}", file=sys.stderr)
    select.select([fd], [], [])
    os.close(fd)
    return 0


def chat(client: Client, params: Mapping[str, Any]) -> int:
    """Talk with the model until the end of the input."""
    print(f"{client.welcome.model_names[0]}; end with Ctrl-D", file=sys.stderr)
    messages: Messages = []
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=sys.stderr)
            return 0
        if text.strip():
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": stream_answer(client, messages, params)})


def answer_once(endpoint: str, prompt: str) -> None:
    """Ask one question and stream the answer to stdout."""
    with Client(endpoint) as client:
        stream_answer(client, [{"role": "user", "content": prompt}], ONCE_PARAMS)


def stream_answer(client: Client, messages: Messages, params: Mapping[str, Any]) -> str:
    """Print the answer to a chat as it comes; returns the whole of it. Ctrl-C ends the answer, not the chat."""
    text = ""
    try:
        with client.chat(messages, params, stream=True) as stream:
            for delta in stream:
                text += delta.text
                print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return text


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
