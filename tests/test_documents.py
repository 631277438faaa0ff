"""The documents against the programs: options, files and links exist, examples run, migration tables are true."""

import doctest
import re
import runpy
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch

from common.cli import OptionParser, config_from
from common.errors import ConfigError
from common.messages import NewSlots, SlotInit, SlotSampling, StepPlan
from common.other_engines import INSTEAD
from kernels.step_layout import PlanLayout, StepInputs
from launcher import serve
from worker_proc.slots import SlotMemory, SlotMirror
from worker_proc.step_inputs import StepStager, fill_inputs

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
OTHER_PROGRAMS = {
    "deployment.md": {"--gpus", "--stop-timeout", "--ipc", "--shm-size", "--no-install-recommends", "--no-cache-dir",
                      "--create-home", "--entrypoint", "--rm", "--build-arg", "--cap-drop", "--from-file", "--home-dir",
                      "--from", "--init", "--interval", "--no-deps", "--wheel-dir", "--now", "--read-only",
                      "--security-opt", "--shell", "--start-period", "--system", "--timeout", "--tmpfs", "--uid"},
}  # fmt: skip
"""Options of other programs that a document names."""
VERB_OPTIONS = {"--pid", "--watch", "--json", "--system", "--temperature", "--max-tokens", "--server-key", "--revoke"}
"""Options of status, chat and keys; tests/frontend/test_terminal.py and tests/e2e use them."""
DOCUMENTS_OF_OPTIONS = ("running.md", "deployment.md", "security.md", "observing.md", "serving.md")


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Every name that `launch.py serve` takes, the hidden ones not."""
    parser = OptionParser(prog="launch.py")
    found = {name for name in parser._option_string_actions if name.startswith("--")}
    return found | {"--once", "--version"}


def named(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))


def test_the_parser_knows_what_the_tests_take_for_granted(options):
    assert {"--model", "--no-http", "--config", "--metrics-prefix"} <= options
    assert serve.parse(["--once", "Hi"]).once == "Hi"


@pytest.mark.parametrize("name", DOCUMENTS_OF_OPTIONS)
def test_options_that_a_document_names_exist(name, options):
    text = (ROOT / "docs" / name).read_text()
    absent = {"--trust-remote-code"}  # said not to exist
    unknown = named(text) - options - VERB_OPTIONS - OTHER_PROGRAMS.get(name, set()) - absent
    assert unknown == set()


def test_the_file_of_options_in_running_md_is_taken(tmp_path):
    [text] = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "running.md").read_text(), re.DOTALL)
    (tmp_path / "options.yaml").write_text(text)
    config = config_from(serve.parse(["--config", str(tmp_path / "options.yaml"), "--port", "9001"]))
    assert (config.server.port, config.model.max_model_len, config.model.model) == (9001, 8192, "path/to/folder")
    assert config.model.served_model_name == ("small", "tiny")


def migration_rows() -> list[tuple[str, set[str], str, set[str]]]:
    """Rows of the tables: engine, its options, the cell that stands for ours, our options in it."""
    rows, engine = [], ""
    for line in (ROOT / "docs" / "migrating.md").read_text().splitlines():
        if match := re.match(r"\| (vLLM|SGLang) \| here \|", line):
            engine = match[1]
        elif match := re.match(r"\| (`--[^|]*) \| ([^|]*) \| ([^|]*)\|$", line):
            rows.append((engine, named(match[1]), match[2].strip(), named(match[2])))
    return rows


def test_the_migration_tables_are_true(options):
    rows = migration_rows()
    assert {engine for engine, *_ in rows} == {"vLLM", "SGLang"} and len(rows) > 40
    for engine, theirs, cell, ours in rows:
        if cell == "same":
            assert theirs <= options, f"{engine}: {theirs - options} is not taken"
        elif cell == "–":
            assert not theirs & options, f"{engine}: {theirs & options} exists"
        else:
            assert ours and ours <= options, f"{engine}: {cell} for {theirs}"
            assert not theirs & options, f"{engine}: {theirs & options} is taken as it is"


def test_an_option_that_is_refused_is_refused_with_what_the_migration_tables_say():
    """Unknown, without a word: whoever came from vLLM had to find the table."""
    told = {flag for _, theirs, cell, _ in migration_rows() if cell != "same" for flag in theirs}
    assert told == INSTEAD.keys()
    for flag in told:
        with pytest.raises(ConfigError) as caught:
            serve.parse([flag, "x"])
        assert str(caught.value) == f"unknown argument {flag}; {INSTEAD[flag]}"


def test_hints_at_other_options_name_existing_ones(options):
    assert named(" ".join(INSTEAD.values())) <= options


def test_notes_of_the_migration_tables_name_existing_options(options):
    text = (ROOT / "docs" / "migrating.md").read_text()
    notes = " ".join(line.rsplit("|", 2)[1] for line in text.splitlines() if line.startswith("| `--"))
    prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    assert named(notes) | named(prose) <= options


def test_every_option_of_ours_with_another_engines_name_is_in_a_table(options):
    told = {flag for _, theirs, cell, _ in migration_rows() if cell == "same" for flag in theirs}
    aliases = {"--model-path", "--tokenizer-path", "--context-length", "--page-size", "--mem-fraction-static",
               "--max-running-requests", "--max-queued-requests", "--disable-cuda-graph", "--disable-radix-cache",
               "--tp-size", "--log-requests", "--num-gpu-blocks-override", "--scheduling-policy", "--random-seed",
               "--enable-deterministic-inference"}  # fmt: skip
    assert aliases <= options and aliases <= told


def anchors(path: Path) -> set[str]:
    """What links to a document's headings end with."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", path.read_text()):
        if not target.startswith("http"):
            there = path.parent / target if target else path
            assert there.exists(), f"{path.name} links to {target}"
            assert not anchor or anchor in anchors(there), f"{path.name} links to {target}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(path):
    rooms = "benchmarks|common|examples|frontend|kernels|launcher|scheduler_proc|tests|worker_proc"
    for name in re.findall(rf"`((?:{rooms})/[\w/]+\.\w+)`", path.read_text()):
        assert (ROOT / name).exists(), f"{path.name} names {name}"


@pytest.mark.parametrize(("arguments", "first"), [((), 1), ((7,), 3)], ids=["enough memory", "too little"])
def test_what_the_scheduler_does_is_what_the_document_shows(arguments, first, capsys):
    runpy.run_path(str(ROOT / "examples" / "watch_the_scheduler.py"))["main"](*arguments)
    heading, *rows, end = capsys.readouterr().out.splitlines()
    assert end == "requests with all of their 6 tokens: 4 of 4"
    tables = re.findall(r"```\n(step  .*?)```", (ROOT / "docs" / "how-it-works.md").read_text(), re.DOTALL)
    shown = [table.splitlines() for table in tables]
    assert [heading, *rows[first - 1 : first + len(shown[len(arguments)]) - 2]] == shown[len(arguments)]


@pytest.mark.parametrize("arguments", [["--help"], ["x"], ["7", "0"], ["-1"], ["1", "2", "3"]], ids=" ".join)
def test_the_example_of_the_scheduler_says_what_it_wants(arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["watch_the_scheduler.py", *arguments])
    with pytest.raises(SystemExit, match=r"^usage: .*watch_the_scheduler\.py \[BLOCKS \[TOKENS\]\]$"):
        runpy.run_path(str(ROOT / "examples" / "watch_the_scheduler.py"), run_name="__main__")


def test_python_examples_print_what_the_document_shows():
    failed, attempted = doctest.testfile(str(ROOT / "docs" / "how-it-works.md"), module_relative=False)
    assert failed == 0 and attempted > 20


def test_the_packed_batch_is_what_the_document_shows():
    memory, mirror = SlotMemory(2, 32, 4, torch.device("cpu")), SlotMirror(2)
    decoding = SlotInit(slot=0, token_ids=array("i", range(10, 16)), prompt_count=5, computed_count=5,
                        block_ids=array("i", [3, 1]), sampling=SlotSampling())  # fmt: skip
    prompt = SlotInit(slot=1, token_ids=array("i", range(20, 29)), prompt_count=9, computed_count=4,
                      block_ids=array("i", [0]), sampling=SlotSampling())  # fmt: skip
    plan = StepPlan(step_id=1, new_slots=NewSlots.of(decoding, prompt), decode_slots=array("H", [0]),
                    chunk_slots=array("H", [1]), chunk_token_counts=array("i", [3]), chunk_samples=array("B", [0]),
                    chunk_block_counts=array("i", [1]), block_ids=array("i", [2]))  # fmt: skip
    layout = PlanLayout(rows=2, blocks=1)
    buffer = np.zeros(layout.size, dtype=np.int32)
    stager = StepStager(memory, mirror, layout, token_limit=4)
    memory.apply(*map(torch.from_numpy, stager.change_slots(plan).arrays()))
    packed = stager.pack(plan, buffer)
    inputs = StepInputs.allocate(packed.row_count, packed.token_count, "cpu")
    fill_inputs(buffer, layout, memory.state, inputs, block_size=4)
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    shown = dict(re.findall(r"^\| `(\w+)` \| `(\[[-\d, ]+\])` \|", text, re.MULTILINE))
    assert shown == {name: str(getattr(inputs, name).tolist()) for name in shown} and len(shown) == 6
