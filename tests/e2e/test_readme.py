"""README's own programs and commands, run as they stand there; only addresses and the model are those of the test."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.cli import config_from
from frontend import Client
from launcher import serve

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
VERBS = ("status", "chat", "stop", "--help")


@pytest.fixture
def here(server, tiny_model_dir):
    """What README says, and what it is in this test."""
    with Client(server.ready["client_endpoint"]) as client:
        [name, *_] = client.welcome.model_names
    return {
        "http://127.0.0.1:8000": server.ready["http"],
        "tcp://127.0.0.1:5555": server.ready["client_endpoint"],
        "smollm2-135m-instruct": name,
        'LLM("default", max_model_len=2048)': f'LLM({str(tiny_model_dir)!r}, max_model_len=256, dtype="float32")',
    }


def replaced(text: str, here: dict[str, str]) -> str:
    for theirs, ours in here.items():
        text = text.replace(theirs, ours)
    return text


def test_there_is_something_to_try():
    assert len(PROGRAMS) == 3 and sum("launch.py" in line for line in COMMANDS) > 6


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda text: text.split()[1])
def test_a_program_runs_and_says_something(program, here, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", replaced(program, here)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout.strip()


def test_the_curl_command_gets_an_answer(here):
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    [command] = [text for language, text in BLOCKS if language == "bash" and text.startswith("curl ")]
    run = subprocess.run(["bash", "-c", replaced(command, here)], capture_output=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr.decode()
    assert json.loads(run.stdout)["choices"][0]["message"]["role"] == "assistant"


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("python launch.py")])
def test_a_command_line_is_taken(line):
    words = shlex.split(line, comments=True)[2:]
    words = words[1:] if words[:1] == ["check"] else words  # it takes what serve takes
    if not words or words[0] not in VERBS:
        config = config_from(serve.parse(words))
        assert config.model.model == (words[0] if words and not words[0].startswith("-") else "default")
