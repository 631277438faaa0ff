"""The verb `serve`: runs one engine until it is told to stop, or for the one answer of `--once`.

Makes the run directory, reports where the engine serves (a line for people, `ready.json` for programs), and leaves the
processes to the `Supervisor`. Called by `launcher.command`, by `launcher.check` for the same options. Loads no torch.
"""

import argparse
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from common import log
from common.cli import MODEL_DESTINATION, OptionParser, config_from, is_given, program_name
from common.config import EngineConfig, ServerOptions, is_loopback, with_changes
from common.errors import ConfigError, StartupError, TriremeError
from common.processes import Wakeup, discard_stdout, raise_file_limit, seconds_since_start
from common.run_dir import RunDir, write_atomically
from common.version import own_version
from launcher.service_manager import READY, STOPPING, tell_service_manager
from launcher.supervisor import ProcessLost, StopRequested, Supervisor

DESCRIPTION = """Serve a language model. That is the verb serve, which may be left out. The others, each with --help:

  check   say whether serve would start here with these options, and with what
  status  show the engines that run
  chat    talk to one of them
  stop    end one of them
  bench   time workloads
  keys    make keys for clients on other machines"""

logger = logging.getLogger("launch")


def serve(arguments: argparse.Namespace) -> int:
    """Run an engine until it is told to stop, or for one answer; returns the exit code."""
    if arguments.version:
        print(f"trireme {own_version()}")
        return 0
    config = configuration(arguments)
    log.set_up("supervisor", config.log.log_level, config.log.log_format)
    if arguments.once is not None and sys.stderr.isatty():
        log.say(f"starting {config.model_name()}")
    wakeup = Wakeup()
    raise_file_limit()
    with RunDir() as run_dir:
        endpoint = config.server.client_endpoint or f"ipc://{run_dir.path}/client.sock"
        server = dataclasses.replace(config.server, client_endpoint=endpoint)
        config = with_changes(config, server=server, run_dir=str(run_dir.path))
        if warning := open_door(server):
            logger.warning("%s", warning)
        supervisor = Supervisor(config, run_dir, wakeup, arguments.parent_pipe)
        try:
            tell_service_manager(status=f"starting {config.model_name()}")
            supervisor.start()
            _announce(supervisor, run_dir, arguments)
            if arguments.once is not None:
                return _run_once(supervisor, wakeup, arguments.once)
            supervisor.run_until(lambda: False)
        except StopRequested as stop:
            logger.info("stopping: %s", stop)
            tell_service_manager(STOPPING, status=f"requests in flight have {stop.grace_s:g} s to finish")
            supervisor.stop(stop.grace_s if arguments.once is None else 0.0)
            return 0 if arguments.once is None else 128 + signal.SIGINT
        except ProcessLost as lost:
            supervisor.announce_loss(lost)
            raise
        finally:
            supervisor.close()
    return 0


def _announce(supervisor: Supervisor, run_dir: RunDir, arguments: argparse.Namespace) -> None:
    """Report that the engine serves, and where: a line for people, a file for programs, a word for systemd."""
    seconds = seconds_since_start()
    config = supervisor.config
    keyed = " (with keys)" if config.server.client_keys else ""
    where = [
        supervisor.http and f"HTTP on {supervisor.http}/v1",
        f"client socket {config.server.client_endpoint}{keyed}",
    ]
    line = f"ready in {seconds:.1f} s: {config.model_name()}, {', '.join(filter(None, where))}"
    ready = {
        "pid": os.getpid(),
        "model": config.model_name(),
        "http": supervisor.http,
        "client_endpoint": config.server.client_endpoint,
        "local_endpoint": config.local_client_endpoint(),
        "ready_at_s": time.time(),
    }
    text = json.dumps(ready)
    run_dir.write("ready.json", text)
    if arguments.ready_file:
        try:
            write_atomically(Path(arguments.ready_file), text)
        except OSError as error:
            raise StartupError(f"cannot write {arguments.ready_file}: {error.strerror}") from None
    tell_service_manager(READY, status=line)
    try:
        if arguments.once is None:
            print(line, flush=True)
        else:
            log.say(line)
    except BrokenPipeError:  # no reason not to serve
        discard_stdout()


class _Answer(threading.Thread):
    """Streams one chat answer to stdout beside the supervisor's loop."""

    def __init__(self, endpoint: str, prompt: str, wakeup: Wakeup) -> None:
        super().__init__(name="answer", daemon=True)
        self.done = False
        self.error: Exception | None = None
        self._endpoint = endpoint
        self._prompt = prompt
        self._wakeup = wakeup

    def run(self) -> None:
        """Ask, print, and wake the supervisor."""
        try:
            from frontend.terminal_chat import answer_once

            answer_once(self._endpoint, self._prompt)
        except Exception as error:
            self.error = error
        self.done = True
        self._wakeup.poke()


def _run_once(supervisor: Supervisor, wakeup: Wakeup, prompt: str) -> int:
    answer = _Answer(supervisor.config.local_client_endpoint(), prompt, wakeup)
    answer.start()
    supervisor.run_until(lambda: answer.done)
    supervisor.stop(0.0)
    if isinstance(answer.error, TriremeError | BrokenPipeError):
        raise answer.error
    if answer.error:
        raise TriremeError(f"no answer: {answer.error}")
    return 0


def make_parser(prog: str, usage: str, description: str, *, show_options: bool = True) -> OptionParser:
    """A parser of all that `serve` takes; `check` takes the same."""
    parser = OptionParser(prog=prog, usage=usage, description=description, show_options=show_options)
    shown = (lambda text: text) if show_options else (lambda _: argparse.SUPPRESS)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--once", metavar="PROMPT", help=shown("start, stream one chat answer to stdout, stop"))
    parser.add_argument("--version", action="store_true", help=shown("print the version"))
    parser.add_argument("--ready-file", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--parent-pipe", type=int, default=-1, help=argparse.SUPPRESS)
    return parser


def parse(arguments: Sequence[str], parser: OptionParser | None = None) -> argparse.Namespace:
    """The options of `serve` as they are given; raises ConfigError for an empty `--once`."""
    parser = parser or make_parser(program_name(), "%(prog)s [serve] [MODEL] [options]", DESCRIPTION)
    parsed = parser.parse(arguments)
    if parsed.once is not None and not parsed.once.strip():
        raise ConfigError("--once: the prompt is empty")
    if parsed.model:
        setattr(parsed, MODEL_DESTINATION, parsed.model)
    return parsed


def configuration(arguments: argparse.Namespace) -> EngineConfig:
    """What parsed options amount to; raises ConfigError for what cannot be served."""
    config = config_from(arguments)
    if arguments.once is None:
        return config
    config = with_changes(config, server=dataclasses.replace(config.server, http=False))
    if config.log.log_level == "info" and not is_given(arguments, "log", "log_level"):
        config = with_changes(config, log=dataclasses.replace(config.log, log_level="warning"))
    return config


def open_door(server: ServerOptions) -> str:
    """What to say of an HTTP API that other machines reach without a key; empty where there is nothing to say."""
    if not server.http or is_loopback(server.host) or server.uds or server.api_key:
        return ""
    return f"whoever reaches {server.host} can use this engine; --api-key protects it"
