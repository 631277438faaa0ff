"""A recorded run of the real processes; each process replayed alone gives what it gave; traces on the way."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import RequestError
from common.messages import decode_for_worker
from common.recording import Direction, Link, Recording
from frontend import Client, SamplingParams
from frontend.replay import is_hint
from tests.support.patient_http import post
from tests.support.server import ROOT, Server

pytestmark = pytest.mark.timeout(240)
ROOMS = {"scheduler": "scheduler_proc", "worker-0": "worker_proc", "frontend": "frontend"}
PROMPTS = ["The sea", "the open sea, the blue, the fresh", "¿Dónde está el mar? 海は青い"]
TRACED_STEPS = 10


def talk(client: Client) -> None:
    """Requests of every kind, more than the cache holds at once."""
    client.generate_batch(PROMPTS * 5, SamplingParams(max_tokens=40, ignore_eos=True))
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1, n=2, stop=["e"])
    assert list(client.generate(PROMPTS[1], params, stream=True))
    with client.generate(PROMPTS[2], SamplingParams(max_tokens=400, ignore_eos=True), stream=True) as stream:
        next(stream)  # and no more: leaving aborts it
    with pytest.raises(RequestError, match="at least one"):
        client.generate("", SamplingParams(max_tokens=5))
    with pytest.raises(RequestError, match="deadline"):
        client.generate(PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True), timeout_s=0.001)


def trace(server: Server) -> None:
    """Trace two processes while they work on a request, and not any more while they work on the next."""
    url = server.ready["http"]
    for order, line in (("start_profile", "tracing"), ("stop_profile", "trace written")):
        for process in ("scheduler", "frontend"):
            assert post(f"{url}/{order}", json={"process": process}).status_code == 200
            server.wait_for_line(f"{process} +{line}")  # the order takes its way through the supervisor
        body = {"prompt": PROMPTS[0], "max_tokens": 20, "stream": True}
        assert "[DONE]" in post(url + "/v1/completions", json=body).text


@pytest.fixture(scope="module")
def run(tiny_model_dir, tmp_path_factory) -> Path:
    """A folder with `recording` and `traces` of one run."""
    folder = tmp_path_factory.mktemp("run")
    options = ["--dtype", "float32", "--block-size", "4", "--num-kv-blocks", "120", "--record", folder / "recording"]
    options += ["--preemption", "swap", "--swap-space-bytes", 1 << 20]  # whose speed is measured anew in each start
    options += ["--profile", "worker", "--profile-steps", str(TRACED_STEPS), "--profile-dir", folder / "traces"]
    with Server(tiny_model_dir, *map(str, options)) as server:
        with Client(server.ready["client_endpoint"]) as client:
            talk(client)
        trace(server)
        assert server.stop() == 0, server.stderr()
    return folder


def replay(process: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"{ROOMS[process]}.replay", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("process", ROOMS)
def test_a_process_alone_gives_what_it_gave(run, process, tmp_path):
    trace = tmp_path / "trace.json"
    done = replay(process, run / "recording", "--profile", trace)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["process"] == process
    records = Recording.load(run / "recording", process).records
    sent = [record for record in records if record.direction == Direction.OUT and not is_hint(record)]
    assert (summary["equal"], summary["different"]) == (len(sent), 0)
    assert len(sent) > 100 and summary["steps"] > 30  # a turn takes in up to three messages where the machine is busy
    names = trace_names(trace)
    wanted = {
        "scheduler": "plan_step",
        "worker-0": "forward",
        "frontend": "submit",
    }[process]
    assert any(wanted in name for name in names), names.most_common(20)


def test_what_one_process_sent_the_next_received(run):
    records = {name: Recording.load(run / "recording", name).records for name in ROOMS}

    def on(process: str, link: Link, direction: Direction) -> list[bytes]:
        return [r.data for r in records[process] if (r.link, r.direction) == (link, direction)]

    for link, sender, receiver in (
        (Link.REQUESTS, "frontend", "scheduler"),
        (Link.PLANS, "scheduler", "worker-0"),
        (Link.RESULTS, "worker-0", "scheduler"),
    ):
        sent, received = on(sender, link, Direction.OUT), on(receiver, link, Direction.IN)
        assert received and received == sent[: len(received)], link
    outputs = on("scheduler", Link.OUTPUTS, Direction.OUT)
    assert on("frontend", Link.OUTPUTS, Direction.IN) == outputs[: len(on("frontend", Link.OUTPUTS, Direction.IN))]


def test_a_change_is_found_and_shown(run, tmp_path):
    path = tmp_path / "scheduler.rec"
    shutil.copy(run / "recording" / "scheduler.rec", path)
    plan = next(r.data for r in Recording.load(tmp_path, "scheduler").records if r.link == Link.PLANS)
    changed = replace(decode_for_worker(plan), step_id=2).to_wire()
    path.write_bytes(path.read_bytes().replace(plan, changed, 1))
    done = replay("scheduler", tmp_path)
    assert done.returncode == 1
    assert "first difference: message 1 on plans\n  recorded: StepPlan(step_id=2," in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["different"] == 1


@pytest.mark.parametrize("process", ROOMS)
def test_a_recording_that_breaks_off_is_refused_in_one_line(run, process, tmp_path):
    path = tmp_path / f"{process}.rec"
    path.write_bytes((run / "recording" / path.name).read_bytes()[:-1000])
    done = replay(process, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "breaks off" in done.stderr and done.stderr.count("\n") == 1


def trace_names(path: Path) -> Counter[str]:
    """The names in a trace that Perfetto opens."""
    return Counter(event.get("name", "") for event in json.loads(path.read_text())["traceEvents"])


def test_traces_of_the_running_processes(run):
    paths = {path.name.rsplit("-", 2)[0]: path for path in (run / "traces").iterdir()}
    assert set(paths) == set(ROOMS)
    worker = trace_names(paths["worker-0"])
    assert {name: worker[name] for name in ("input", "forward", "sampling", "report")} == {
        "input": TRACED_STEPS, "forward": TRACED_STEPS, "sampling": TRACED_STEPS, "report": TRACED_STEPS,
    }  # fmt: skip
    assert any("Loop._plan" in name for name in trace_names(paths["scheduler"]))
    assert any("Core.handle" in name for name in trace_names(paths["frontend"]))
