"""`launch.py check` in its real processes, beside `serve`: what the one refuses, the other does in the same words."""

import json
import shutil

import pytest

from tests.e2e.test_commands import command

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def places(tmp_path):
    """Folders that `serve` would write to."""
    for name in ("run", "cwd"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_model_that_serve_starts_with(tiny_model_dir, places, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(places / "run"))
    run = command("check", tiny_model_dir, "--port", "0", "--num-kv-blocks", "64", cwd=places / "cwd")
    assert (run.returncode, run.stderr) == (0, ""), run.stdout
    lines = run.stdout.splitlines()
    assert lines[-1] == "serve would start"
    assert "; 64 blocks of 16, 1,024 tokens" in run.stdout
    assert list((places / "run").iterdir()) == list((places / "cwd").iterdir()) == []


def test_a_model_that_serve_refuses_is_refused_in_its_words(tiny_model_dir, places):
    folder = shutil.copytree(tiny_model_dir, places / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 96}))
    run = command("check", folder, "--port", "0", "--json")
    assert run.returncode == 1, run.stderr
    [text] = [entry["text"] for entry in json.loads(run.stdout)["findings"] if entry["status"] == "problem"]
    served = command("serve", folder, "--port", "0", "--log-level", "error", run_dirs=places / "run")
    assert (served.returncode, served.stderr) == (2, f"trireme: worker-0 failed: {text}\n")
