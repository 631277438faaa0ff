"""Grammars and their compilation beside the core, on a tiny vocabulary."""

import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from common.child import READING_VOCABULARY
from common.messages import AbortRequests, AddRequest
from common.sampling_params import SamplingParams
from scheduler_proc.grammar import COMPILED_LIMIT, Compilation, Grammar, GrammarError, Grammars
from tests.support import tiny

END_ID = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save_tokenizer(folder)
    return folder


@pytest.fixture
def grammars(folder) -> Grammars:
    return Grammars(folder / "tokenizer.json", 330)


def request(request_id: int = 1, **wanted: object) -> AddRequest:
    params = SamplingParams(structured_outputs=wanted)
    return AddRequest(
        request_id=request_id, prompt_token_ids=array("i", [3]), params=params, end_token_ids=(END_ID,)
    )  # fmt: skip


def ids_of(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token_id for token_id in range(8 * len(mask)) if bits >> token_id & 1]


def test_masks_cover_the_model_s_vocabulary_and_follow_the_grammar(grammars):
    grammar = grammars.start(request(regex="ab*"))
    assert len(grammar.mask) == 4 * -(-330 // 32)
    (a,) = ids_of(grammar.mask)
    assert grammar.advance(a)
    after = ids_of(grammar.mask)
    assert END_ID in after and len(after) == 2, "the grammar may go on, or end"


def test_a_token_that_the_grammar_forbids_is_an_error(grammars):
    grammar = grammars.start(request(regex="ab*"))
    with pytest.raises(GrammarError, match="satisfy") as refusal:
        grammar.advance(END_ID)
    assert "<state>" not in str(refusal.value), "the parser's state has times in it: no two runs have the same"


@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_grammar_is_led_on_to_where_an_output_stands(count, grammars, monkeypatch):
    """As token by token, but with one mask at the end: a scheduler may have to do it for hundreds of long outputs."""
    wanted = request(regex="(ab)*")
    stepped, output = grammars.start(wanted), []
    for _ in range(count):
        output.append(next(token_id for token_id in ids_of(stepped.mask) if token_id != END_ID))
        assert stepped.advance(output[-1])
    masks, look_ahead = [], Grammar._look_ahead
    monkeypatch.setattr(Grammar, "_look_ahead", lambda grammar: masks.append(1) or look_ahead(grammar))
    led = grammars.start(wanted, array("i", output))
    assert led.mask == stepped.mask and len(masks) == 1 + bool(count)
    monkeypatch.undo()
    a, b = (next(id_ for id_ in ids_of(grammar.mask) if id_ != END_ID)
            for grammar in (grammars.start(request(regex=text)) for text in ("a", "b")))  # fmt: skip
    for impossible in ([b], [a, a], [*output, [b, a][count % 2]]):
        with pytest.raises(GrammarError):
            grammars.start(wanted, impossible)
    with pytest.raises(GrammarError, match="complete already"):
        grammars.start(request(regex="ab"), [a, b])


def test_samples_do_not_share_their_place(grammars):
    first, second = grammars.start(request(regex="[ab]c")), grammars.start(request(regex="[ab]c"))
    before = second.mask
    first.advance(ids_of(first.mask)[0])
    assert first.mask != before
    assert second.mask == before


def test_compiled_grammars_are_bounded(grammars):
    for number in range(COMPILED_LIMIT + 5):
        grammars.compile(request(choice=[f"c{number}"]).params.structured_outputs)
    assert len(grammars._compiled) == COMPILED_LIMIT


def wait_for(compilation: Compilation) -> list[AddRequest]:
    while not (ready := compilation.ready()):
        assert not compilation.is_idle
    return ready


def test_a_grammar_that_finds_no_memory_may_find_it_the_next_time(grammars, monkeypatch):
    def no_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("scheduler_proc.grammar.load_tokenizer", no_memory)
        with pytest.raises(GrammarError, match="there is no memory for it"):
            grammars.start(request(regex="ab*"))
    assert grammars.start(request(regex="ab*")).mask


def test_a_panic_of_the_library_costs_the_request(grammars, monkeypatch):
    class Panic(BaseException):
        """As pyo3's PanicException."""

    def panic(*_: object) -> None:
        raise Panic("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr("scheduler_proc.grammar.grammar_text", panic)
    with pytest.raises(GrammarError, match="unwrap"):
        grammars.start(request(regex="ab*"))


def test_only_requests_with_an_uncompiled_grammar_wait(grammars):
    compilation = Compilation(grammars)
    plain = AddRequest(request_id=2, prompt_token_ids=array("i", [3]), params=SamplingParams())
    assert not compilation.pass_on(request(1, regex="x+"))
    assert compilation.pass_on(plain)
    assert [message.request_id for message in wait_for(compilation)] == [1]
    assert compilation.is_idle
    assert compilation.pass_on(request(3, regex="x+")), "compiled by now"


def test_the_supervisor_hears_before_the_vocabulary_is_read(grammars):
    states: list[str] = []
    compilation = Compilation(grammars, states.append)
    compilation.pass_on(request(1, regex="x+"))
    assert states == [READING_VOCABULARY]
    wait_for(compilation)
    compilation.pass_on(request(2, regex="y+"))
    wait_for(compilation)
    assert states == [READING_VOCABULARY, "serving"]


def test_a_wrong_grammar_comes_out_too(grammars):
    compilation = Compilation(grammars)
    compilation.pass_on(request(1, regex="(["))
    (message,) = wait_for(compilation)
    with pytest.raises(GrammarError, match="regex"):
        grammars.start(message)


def test_what_another_thread_decides_can_be_recorded_and_replayed(grammars):
    counts: list[float] = []

    def record(count):
        def observed() -> float:
            counts.append(count())
            return counts[-1]

        return observed

    recorded = Compilation(grammars, observe=record)
    for number in range(4):
        recorded.pass_on(request(number, choice=[f"c{number}"]))
    passes = []
    while not recorded.is_idle:
        passes.append([message.request_id for message in recorded.ready()])
    script = iter(counts)
    replayed = Compilation(Grammars(grammars.tokenizer_file, 330), observe=lambda _: lambda: next(script))
    for number in range(4):
        replayed.pass_on(request(number, choice=[f"c{number}"]))
    assert [[message.request_id for message in replayed.ready()] for _ in passes] == passes


def test_an_aborted_request_does_not_come_out(grammars):
    compilation = Compilation(grammars)
    compilation.pass_on(request(1, regex="x+"))
    assert compilation.pass_on(AbortRequests(array("i", [1])))
    assert compilation.is_idle
    assert compilation.ready() == []


def test_what_waits_at_the_end_gets_its_error(grammars):
    compilation = Compilation(grammars)
    compilation.pass_on(request(1, regex="x+"))
    (failed,) = compilation.fail_all("shutting_down", "the engine is shutting down")
    assert (failed.request_id, failed.status) == (1, 503)
    assert compilation.is_idle


def test_nothing_is_loaded_before_it_is_needed():
    script = "import sys, scheduler_proc.main; print('llguidance' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
