"""The verbs of the command line. A failure becomes one line on stderr and an exit code.

Exit codes are those of `common.errors`. Called by `launch.py`.
"""

import importlib
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import setproctitle

from common import log
from common.cli import VerbParser, log_format_in, program_name
from common.config import DEFAULT_MODEL
from common.errors import EXIT_CODES, ConfigError, TriremeError, exit_code
from common.processes import open_standard_files
from launcher import serve
from launcher.supervisor import ProcessLost

logger = logging.getLogger("launch")

VERBS = ("serve", "status", "stop", "chat", "check", "bench", "keys")


def run(argv: Sequence[str]) -> int:
    """Run one verb; returns the exit code."""
    open_standard_files()
    setproctitle.setproctitle("trireme-supervisor")
    arguments = list(argv)
    if _asks_for_json(arguments):
        log.set_up("supervisor", form="json")
    verb = arguments.pop(0) if arguments and _is_verb(arguments[0]) else "serve"
    try:
        if verb == "serve":
            return serve.serve(serve.parse(arguments))
        if verb == "check":
            from launcher import check

            return check.run(arguments)
        if verb == "bench":
            return _bench(arguments)
        if verb == "keys":
            from launcher import keys

            return keys.run(arguments)
        if verb in VERBS:
            from frontend import terminal

            return terminal.run(verb, arguments)
        raise ConfigError(
            f"unknown verb {verb!r}; wanted one of {', '.join(VERBS)}, or a model: a folder or .gguf file (there is "
            f"none of this name here), or a hub id, which has its owner before the name, as Qwen/Qwen3-0.6B does"
        )
    except ProcessLost as lost:
        _report(lost)
        return next((code for code in EXIT_CODES.values() if code == lost.exit_code), exit_code(lost))
    except TriremeError as error:
        if not log.is_json() and _file_asks_for_json(arguments):
            log.set_up("supervisor", form="json")
        _report(error)
        return exit_code(error)
    except (BrokenPipeError, ModuleNotFoundError):  # the entry's to report
        raise
    except Exception as error:
        if not log.is_json():
            raise
        logger.critical("stopped by an error", exc_info=error)
        return exit_code(error)


def _bench(arguments: Sequence[str]) -> int:
    """Run the benchmark, which keeps no results unless told where.

    Raises:
        ConfigError: it refuses its arguments, which ends it with a sentence.
    """
    benchmark = importlib.import_module("benchmarks.throughput")
    try:
        benchmark.main(["--output", "", *arguments], f"{program_name()} bench")
    except SystemExit as end:
        if isinstance(end.code, str):
            raise ConfigError(end.code) from None
        raise
    return 0


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether the command line asks for a log of JSON objects; also one that is refused should be reported in it."""
    words = [argument.replace("_", "-") for argument in arguments]
    return "--log-format=json" in words or ("--log-format", "json") in itertools.pairwise(words)


def _file_asks_for_json(arguments: Sequence[str]) -> bool:
    """The same of a file with options; what the command line says wins."""
    parser = VerbParser(add_help=False)
    parser.add_argument("--config")
    parser.add_argument("--log-format", "--log_format")
    try:
        given, _ = parser.parse_known_args(arguments)
    except ConfigError:
        return False
    return given.log_format is None and bool(given.config) and log_format_in(Path(given.config)) == "json"


def _is_verb(word: str) -> bool:
    """Whether the first word is a verb (or a mistyped one), rather than an option or the model."""
    names_model = word == DEFAULT_MODEL or "/" in word or word.endswith(".gguf") or os.path.exists(word)
    return word in VERBS or not (word.startswith("-") or names_model)


def _report(error: TriremeError) -> None:
    if text := " ".join(str(error).split()):
        log.say(text, "error", log.PROGRAM)
