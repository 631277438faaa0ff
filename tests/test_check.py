"""The verb `check` but for the worker's part: what it prints, how it ends, what it says of this machine."""

import json
import socket
from pathlib import Path

import pytest

import launch
from common.config import EngineConfig, ModelOptions, ProfilingOptions, ServerOptions
from common.errors import ConfigError
from common.findings import OK, PROBLEM, WARNING, Findings
from common.http_socket import bind_http
from launcher import check, command, packages, serve
from launcher.packages import look_at_packages
from tests.support import tiny


class FakePart:
    """Stands for the process that loads torch."""

    def __init__(self, config: EngineConfig, scratch: Path) -> None:
        self.config = config

    def __enter__(self) -> "FakePart":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def findings(self) -> Findings:
        found = Findings()
        found.values = {"model_dir": self.config.model_dir, "tokenizer_dir": self.config.tokenizer_dir}
        return found


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(check, "_WorkerPart", FakePart)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def model(tmp_path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    tiny.save_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return str(folder)


def checked(capsys, *arguments) -> tuple[int, dict]:
    """The exit code, and what `--json` gives with the findings by what they are of."""
    code = launch.main(["check", "--json", "--port", "0", *map(str, arguments)])
    read = json.loads(capsys.readouterr().out)
    return code, read | {"findings": {entry["what"]: entry for entry in read["findings"]}}


def problem(capsys, what: str, *arguments) -> str:
    code, read = checked(capsys, *arguments)
    assert (code, read["would_start"], read["findings"][what]["status"]) == (1, False, PROBLEM)
    assert read["verdict"] == "serve would not start: 1 problem"
    return read["findings"][what]["text"]


def test_lines_and_a_verdict(capsys, model):
    assert launch.main(["check", model, "--port", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok       options        none contradicts another"
    assert lines[-1] == "serve would start"
    assert len({line.index(line[24:].strip()[:12]) for line in lines[:-1]}) == 1, "aligned"
    assert any(line.startswith("ok       chat template  renders") for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prot", "1"],
        ["--max-num-seqs", "100", "--max-num-batched-tokens", "50"],
        ["--preemption", "swap"],
        ["--ssl-keyfile", "k"],
        ["--client-endpoint", "tcp://0.0.0.0:5555"],
        ["--config", "/nowhere.yaml"],
        ["--once", " "],
    ],
)
def test_options_are_refused_as_serve_refuses_them(arguments, capsys):
    with pytest.raises(ConfigError) as caught:
        serve.configuration(serve.parse(arguments))
    assert problem(capsys, "options", *arguments) == str(caught.value)


def test_a_port_in_use(capsys, model):
    with bind_http(ServerOptions(port=0)) as listener:
        port = listener.getsockname()[1]
        text = problem(capsys, "HTTP", model, "--port", port)
    assert text == f"--port {port} on 127.0.0.1 is in use: choose another, or --port 0 for any free one"


def test_a_unix_socket_in_use_stays_and_a_free_one_is_left_free(capsys, model, tmp_path):
    path = tmp_path / "http.sock"
    with bind_http(ServerOptions(uds=str(path))):
        assert f"--uds {path} is in use" in problem(capsys, "HTTP", model, "--uds", path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    path.unlink()
    code, read = checked(capsys, model, "--uds", path)
    assert (code, read["findings"]["HTTP"]["text"]) == (0, f"http+unix://{path} is free")
    assert not path.exists()


def test_an_open_door_is_a_warning(capsys, model):
    code, read = checked(capsys, model, "--host", "0.0.0.0")
    assert (code, read["verdict"]) == (0, "serve would start, with 1 warning")
    assert "whoever reaches 0.0.0.0 can use this engine" in read["findings"]["access"]["text"]
    assert "access" not in checked(capsys, model, "--host", "0.0.0.0", "--api-key", "k")[1]["findings"]


def test_no_model_folder(capsys, tmp_path):
    assert problem(capsys, "model", tmp_path / "no") == f"--model {tmp_path / 'no'}: no such folder or .gguf file"
    (tmp_path / "empty").mkdir()
    assert "so it is no model folder" in problem(capsys, "model", tmp_path / "empty")


def test_a_model_that_is_yet_to_come(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIREME_CACHE", str(tmp_path / "cache"))
    code, read = checked(capsys)
    assert (code, read["verdict"]) == (0, "nothing speaks against a start, but the model is yet to be made ready")


def test_recordings(capsys, model, tmp_path):
    (tmp_path / "r").mkdir()
    assert checked(capsys, model, "--record", tmp_path / "r" / "new")[0] == 0
    assert list((tmp_path / "r").iterdir()) == []
    (tmp_path / "r" / "scheduler.rec").touch()
    text = problem(capsys, "recording", model, "--record", tmp_path / "r")
    assert text.endswith("scheduler.rec is there already; wanted a folder without a recording")
    assert "Not a directory" in problem(capsys, "recording", model, "--record", tmp_path / "r" / "scheduler.rec" / "x")


def test_no_directory_for_sockets(capsys, model, monkeypatch, tmp_path):
    monkeypatch.setattr("common.run_dir.base_dir", lambda: tmp_path / "none")
    assert "cannot make a run directory in" in problem(capsys, "run directory", model)


def test_no_directory_at_all(capsys, model, monkeypatch):
    monkeypatch.setattr("common.run_dir._short_enough", lambda _: False)
    assert "no usable directory for sockets among" in problem(capsys, "run directory", model)


def test_nothing_is_left(capsys, model, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert checked(capsys, model)[0] == 0
    assert sorted(tmp_path.rglob("*")) == before


def found_packages(monkeypatch, versions: dict[str, str | None], **groups) -> dict[str, list[str]]:
    """Texts by status, with these packages of these versions."""
    real = packages.installed_version
    monkeypatch.setattr(packages, "installed_version", lambda name: versions.get(name, real(name)))
    entries = look_at_packages(EngineConfig(**groups)).entries
    return {status: [entry.text for entry in entries if entry.status == status] for status in (OK, WARNING, PROBLEM)}


def test_the_project_file_of_another_package_is_passed_over(monkeypatch, tmp_path):
    """Some are installed into the folder that holds all packages, where ours would be."""
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.setattr(packages, "PROJECT_FILE", tmp_path / "pyproject.toml")
    monkeypatch.setattr(packages.metadata, "metadata", lambda _: {"Requires-Python": ">=3.11"})
    monkeypatch.setattr(packages.metadata, "requires", lambda _: ["pyzmq>=26", "ruff; extra == 'test'"])
    python_range, requirements = packages.declared()
    assert (python_range, [item.name for item in requirements]) == (">=3.11", ["pyzmq"])


def test_packages_of_this_environment_are_in_their_ranges(monkeypatch):
    found = found_packages(monkeypatch, {})
    assert found[WARNING] == found[PROBLEM] == [] and len(found[OK]) == 2


def test_missing_and_outdated_packages(monkeypatch):
    found = found_packages(monkeypatch, {"pyzmq": None, "torch": "2.3.0", "uvicorn": None})
    assert found[PROBLEM] == [
        "pyzmq is missing; pip install 'pyzmq>=26'",
        "uvicorn is missing; pip install 'uvicorn>=0.34'",
    ]
    assert found[WARNING] == ["torch is 2.3.0; the project is for >=2.11,<2.14"]


def test_no_http_needs_no_http_packages(monkeypatch):
    found = found_packages(monkeypatch, {"uvicorn": None}, server=ServerOptions(http=False))
    assert found[PROBLEM] == [] and "these options do without" in found[WARNING][0]


@pytest.mark.parametrize(("model", "count"), [("/some/folder", 0), ("x.gguf", 1)])
def test_a_package_is_missed_only_by_who_needs_it(model, count, monkeypatch):
    assert len(found_packages(monkeypatch, {"gguf": None}, model=ModelOptions(model=model))[PROBLEM]) == count


def test_traces_are_slower_without_their_package(monkeypatch):
    traced = found_packages(monkeypatch, {"viztracer": None}, profiling=ProfilingOptions(profile="scheduler"))
    assert "pip install viztracer" in traced[WARNING][0]


def test_another_python(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.14.1")
    assert found_packages(monkeypatch, {})[WARNING] == ["3.14.1; the project is for >=3.11,<3.13"]


@pytest.mark.parametrize("verb", command.VERBS)
def test_every_verb_explains_itself(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as caught:
        launch.main([verb, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert caught.value.code == 0
    assert lines[0].startswith("usage: launch.py " + (f"{verb} " if verb != "serve" else "[serve] "))
    assert lines[lines.index("", 2) - 1].endswith((".", ":")), "a sentence that says what the verb does"
    assert max(map(len, lines)) <= 120
    if verb == "serve":
        assert {line.split()[0] for line in lines[4:10]} == set(command.VERBS) - {"serve"}
    else:
        assert len(lines) < 25


def test_the_process_that_loads_torch_may_fail(monkeypatch, tmp_path, capfd):
    monkeypatch.undo()
    monkeypatch.setattr("sys.executable", "/bin/false")
    with check._WorkerPart(EngineConfig(), tmp_path) as part:
        [entry] = part.findings().entries
    assert (entry.what, entry.status, entry.text) == ("worker", PROBLEM, "the worker's part ended with exit code 1")


def test_the_bench_verb_keeps_nothing_unless_told_where(monkeypatch):
    calls = []
    monkeypatch.setattr("benchmarks.throughput.main", lambda *arguments: calls.append(arguments))
    assert launch.main(["bench", "--smoke"]) == 0
    assert calls == [(["--output", "", "--smoke"], "launch.py bench")]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--workloads", "b1_99999_9"], "--workloads b1_99999_9 has requests of 100008 tokens"),
        (["--workloads", "b1_128"], "argument --workloads: unknown workload 'b1_128'"),
        (["--nope"], "unrecognized arguments: --nope"),
    ],
)
def test_what_the_bench_verb_refuses_is_said_as_by_the_others(monkeypatch, capsys, arguments, error):
    """A workload too long for the model ended it with code 1, another mistake with its usage."""
    monkeypatch.setattr("benchmarks.throughput.ENGINES", {})
    assert launch.main(["bench", "--max-model-len", "2000", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith(f"trireme: {error}") and "usage" not in printed.err


def test_what_a_killed_check_left_is_removed_by_the_next(capsys, model, tmp_path):
    (tmp_path / "trireme-check-left").mkdir()
    assert checked(capsys, model)[0] == 0
    assert list(tmp_path.glob("trireme-*")) == []
