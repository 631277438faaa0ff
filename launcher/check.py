"""The verb `check`: would `serve` start with these options here, and with what. Starts no engine.

    launch.py check [MODEL] [options of serve] [--json]

Each thing is looked at by the code that `serve` starts with: configuration, addresses and keys in this process, the
tokenizer too (`frontend.preflight`), what needs torch in a process of its own (`worker_proc.preflight`). One line for
each, the verdict last. Exit code 0 if nothing speaks against a start, 1 otherwise. Called by `launcher.command`.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from common.cli import program_name
from common.config import EngineConfig, with_changes
from common.errors import ConfigError, StartupError
from common.findings import MAY_BE_FETCHED, PROBLEM, WARNING, Findings
from common.http_socket import bind_http, file_identity, http_url, remove_own
from common.model_cache import is_hub_id
from common.processes import Child, DeathPipe, raise_file_limit
from common.recording import SUFFIX, check_new
from common.run_dir import RunDir, base_dir
from common.scratch import scratch_folder, unwritable
from launcher import serve
from launcher.model_folders import check_model_folder, folder_at_hand
from launcher.supervisor import engine_rooms

WORKER_TIMEOUT_S = 120.0
"""For the process that loads torch: a driver that hangs should not hang the check."""
DESCRIPTION = """Say whether serve would start here with the same options, and with what; nothing is started.
Takes every option of serve. Exit code 0: nothing speaks against it, 1: something does."""


def run(arguments: Sequence[str]) -> int:
    """Check and print; returns the exit code."""
    parser = serve.make_parser(
        f"{program_name()} check", "%(prog)s [MODEL] [options of serve] [--json]", DESCRIPTION, show_options=False
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines, for programs")
    found = Findings()
    config = None
    with found.refusals("options"):
        config = serve.configuration(serve.parse(arguments, parser))
        found.ok("options", "none contradicts another")
    if config is not None:
        _look(found, config)
    print(as_json(found) if "--json" in arguments else as_text(found))
    return 1 if found.count(PROBLEM) else 0


def as_text(found: Findings) -> str:
    """A line for each finding, and the verdict."""
    width = max(len(entry.what) for entry in found.entries)
    lines = [f"{entry.status:<7}  {entry.what:<{width}}  {entry.text}" for entry in found.entries]
    return "\n".join([*lines, verdict(found)])


def as_json(found: Findings) -> str:
    """The same for programs."""
    entries = [dataclasses.asdict(entry) for entry in found.entries]
    return json.dumps({"would_start": not found.count(PROBLEM), "verdict": verdict(found), "findings": entries})


def verdict(found: Findings) -> str:
    """What the findings amount to."""
    problems, warnings = found.count(PROBLEM), found.count(WARNING)
    if problems:
        return f"serve would not start: {problems} problem{'s' * (problems > 1)}"
    if not found.values.get("model_dir"):
        return "nothing speaks against a start, but the model is yet to be made ready"
    return "serve would start" + (f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else "")


def _look(found: Findings, config: EngineConfig) -> None:
    from frontend import preflight
    from launcher.packages import look_at_packages

    raise_file_limit()
    config = _with_folders_at_hand(found, config)
    base = None
    with found.refusals("run directory"):
        base = base_dir()
    if base is None:
        return
    with scratch_folder(base, "trireme-check-") as scratch, _WorkerPart(config, scratch) as worker:
        found.extend(look_at_packages(config))
        _look_at_run_directory(found)
        _look_at_http(found, config)
        found.extend(preflight.look_at_doors(config))
        _look_at_recording(found, config)
        texts = preflight.look_at_texts(config, config.tokenizer_dir) if config.tokenizer_dir else None
        found.extend(worker.findings())
        if texts is None and (folder := found.values.get("tokenizer_dir")):
            texts = preflight.look_at_texts(config, folder)
            if is_hub_id(config.model.tokenizer or config.model.model):
                texts.soften(MAY_BE_FETCHED)
        found.extend(texts or Findings())
        if folder := found.values.get("model_dir"):
            found.extend(preflight.look_at_embeddings(config, folder))


def _with_folders_at_hand(found: Findings, config: EngineConfig) -> EngineConfig:
    """The configuration with the folders of model and tokenizer, where they need not be fetched or converted."""
    options, model_dir, tokenizer_dir = config.model, "", ""
    with found.refusals("model"):
        if folder := folder_at_hand("--model", options.model):
            check_model_folder(options.model, folder)
            model_dir = folder
    with found.refusals("tokenizer"):
        tokenizer_dir = folder_at_hand("--tokenizer", options.tokenizer) if options.tokenizer else model_dir
    return with_changes(config, model_dir=model_dir, tokenizer_dir=tokenizer_dir)


class _WorkerPart:
    """`worker_proc.preflight` in a process of its own, running while other things are looked at."""

    def __init__(self, config: EngineConfig, scratch: Path) -> None:
        (scratch / "config.json").write_text(config.to_json())
        arguments = ["-m", "worker_proc.preflight", "--config", str(scratch / "config.json"), "--scratch", str(scratch)]
        self._death_pipe = DeathPipe()
        self._child = Child("the worker's part", arguments, self._death_pipe, capture_stdout=True)

    def __enter__(self) -> "_WorkerPart":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.close()
        self._death_pipe.close()

    def findings(self) -> Findings:
        """What it has found, once it has ended; its own failure is a problem."""
        found = Findings()
        with found.refusals("worker"):
            if not self._child.wait(WORKER_TIMEOUT_S):
                raise StartupError(f"its part of the check does not end within {WORKER_TIMEOUT_S:g} s")
            if self._child.exit_code:
                raise StartupError(self._child.describe_end())
            return Findings.from_json(self._child.read_stdout().strip().splitlines()[-1])
        return found


def _look_at_run_directory(found: Findings) -> None:
    with found.refusals("run directory"), RunDir() as run_dir:
        found.ok("run directory", f"one can be made in {run_dir.path.parent}")


def _look_at_http(found: Findings, config: EngineConfig) -> None:
    server = config.server
    if not server.http:
        return
    with found.refusals("HTTP"):
        listener = bind_http(server)
        identity = file_identity(server.uds)
        url = http_url(server, listener)
        listener.close()
        remove_own(server.uds, identity)
        found.ok("HTTP", f"{url} is free" if server.port or server.uds else "takes any free port")
    if warning := serve.open_door(server):
        found.warn("access", warning)


def _look_at_recording(found: Findings, config: EngineConfig) -> None:
    if not config.profiling.record:
        return
    folder = Path(config.profiling.record).absolute()
    with found.refusals("recording"):
        for process in engine_rooms(config):
            check_new(folder / (process + SUFFIX))
        if reason := unwritable(folder):
            raise ConfigError(f"--record: cannot write {folder}: {reason}")
        found.ok("recording", f"{folder} holds none yet and can be written")
