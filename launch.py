"""The command line: `python launch.py`, or `trireme` where the package is installed.

    python launch.py [serve] [MODEL] [options]   run the engine until SIGINT or SIGTERM
    python launch.py --once "..."                start, stream one chat answer to stdout, stop
    python launch.py check [MODEL] [options]     whether `serve` would start with these options here, and with what
    python launch.py status | stop | chat        inspect, stop or chat with the running engine
    python launch.py bench [options]             time workloads (benchmarks.throughput)
    python launch.py keys DIR [NAME ...]         make keys for a client socket that other machines reach

Only the entry: it imports nothing until it can report a missing package or handle an early Ctrl-C. The verbs are in
`launcher.command`, the supervisor in `launcher.supervisor`. Exit codes: 0 stopped as told, 1 a process was lost, 2 a
configuration or request that cannot be served, 3 a failed start, 130 interrupted, 141 nobody reads what a verb prints.
"""

import sys
from collections.abc import Sequence

OWN = ("common", "frontend", "launcher")
INTERRUPTED = 130
UNREAD = 141
"""As shells report a program that SIGPIPE ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    try:
        from launcher.command import run

        code = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `head`, for one, reads no further than it has to
        from common.processes import discard_stdout

        discard_stdout()
        return UNREAD
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OWN:
            raise
        print(f"trireme: the package {error.name} is missing: run pip install -e . first", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
