"""The life of requests, driven by hand: no sockets, no clock, no scheduler."""

import gc
import weakref
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import messages as m
from common.errors import RequestError
from common.sampling_params import SamplingParams
from frontend.events import Final
from tests.support.frontend_in_memory import Events, FrontendInMemory

ALPHABET = "Here is the English alphabet: ABC"


def test_a_request_from_prompt_to_usage(memory_engine, submit):
    events = submit("the sea", max_tokens=9)
    request = memory_engine.sent[0]
    assert request.params.max_tokens == 9
    assert request.params.seed is not None
    assert request.end_token_ids == (1,)
    memory_engine.tokens(0, memory_engine.engine.tokenizer.encode("is"), cached_counts=array("i", [2]))
    memory_engine.say(events, " open", finish="length")
    final = events.end
    assert (final.samples[0].text, events.text()) == ("is open", "is open")
    assert final.samples[0].finish_reason == events.deltas[-1].finish_reason == "length"
    assert final.usage.cached_tokens == 2
    assert final.usage.completion_tokens == len(final.samples[0].token_ids)
    assert final.timings.first_token_s <= final.timings.last_token_s <= final.timings.finished_s
    assert memory_engine.core.live_count == 0


def test_no_part_of_a_stop_string_is_streamed_and_the_rest_is_aborted(memory_engine, submit):
    events = submit(ALPHABET, stop="DEFGHIJ")
    memory_engine.say(events, " DEFGHIJKLM")
    assert events.text() == events.end.samples[0].text == " "
    assert (events.end.samples[0].finish_reason, events.end.samples[0].stop_reason) == ("stop", "DEFGHIJ")
    assert [list(sent.request_ids) for sent in memory_engine.sent[1:]] == [[0]]


def test_a_stop_string_inside_a_token(memory_engine, submit):
    tokenizer = memory_engine.engine.tokenizer
    token_id = next(n for n in range(tokenizer.vocab_size) if "EF" in tokenizer.token_text(n)[1:])
    events = submit(stop="EF")
    memory_engine.tokens(0, [token_id])
    text = tokenizer.token_text(token_id)
    assert events.end.samples[0].text == text[: text.index("EF")]
    assert list(events.end.samples[0].token_ids) == [token_id]


def test_tokens_after_a_stop_string_are_not_counted(memory_engine, submit):
    events = submit(stop="c")
    ids = list(memory_engine.engine.tokenizer.encode("abcabc"))
    memory_engine.tokens(0, ids)
    assert events.end.samples[0].text == "ab"
    assert events.end.usage.completion_tokens < len(ids)


def test_the_stop_string_may_be_kept(memory_engine, submit):
    events = submit(stop=("sea",), include_stop_str_in_output=True)
    memory_engine.say(events, "the sea is")
    assert events.text() == events.end.samples[0].text == "the sea"


def test_an_unfinished_stop_string_comes_out_at_the_end(memory_engine, submit):
    events = submit(stop="DEFGHIJ")
    memory_engine.say(events, "ABC DEF", finish="length")
    assert events.text() == events.end.samples[0].text == "ABC DEF"


def test_min_tokens_keeps_stop_strings_from_ending(memory_engine, submit):
    events = submit(stop="a", min_tokens=3)
    for _ in range(5):
        memory_engine.tokens(0, memory_engine.engine.tokenizer.encode("a"))
    assert events.end.samples[0].text == "aaa"
    assert events.end.usage.completion_tokens == 4


def test_a_stop_string_that_begins_before_min_tokens_and_completes_after_ends_the_output(memory_engine, submit):
    events = submit(stop="ab", min_tokens=3)
    memory_engine.say(events, "xaa")
    memory_engine.say(events, "ba")
    assert events.text() == events.end.samples[0].text == "xa"
    assert events.end.samples[0].stop_reason == "ab"


def test_the_end_token_is_counted_but_not_shown(memory_engine, submit):
    events = submit(skip_special_tokens=False)
    memory_engine.say(events, "ab<|end|>", finish="stop")
    sample = events.end.samples[0]
    assert (sample.text, sample.token_ids[-1], sample.stop_reason) == ("ab", 1, None)


def test_a_named_stop_token_is_the_stop_reason(memory_engine, submit):
    token_id = memory_engine.engine.tokenizer.encode("z")[0]
    events = submit(stop_token_ids=[token_id])
    assert memory_engine.sent[0].end_token_ids == (1, token_id)
    memory_engine.say(events, "abz", finish="stop")
    assert (events.end.samples[0].text, events.end.samples[0].stop_reason) == ("ab", token_id)


def test_ignore_eos_leaves_only_named_stop_tokens(memory_engine, submit):
    submit(ignore_eos=True, stop_token_ids=[9])
    assert memory_engine.sent[0].end_token_ids == (9,)


def test_samples_end_one_by_one_and_the_request_with_the_last(memory_engine, submit):
    events = submit(n=2, stop="!")
    memory_engine.say(events, "a!b", sample_index=0)
    assert events.ends == []
    assert memory_engine.sent[1:] == [m.AbortSamples(array("i", [0]), array("B", [0]))]
    memory_engine.say(events, "the", sample_index=1, finish="length")
    assert [(s.text, s.finish_reason) for s in events.end.samples] == [("a", "stop"), ("the", "length")]
    assert len(memory_engine.sent) == 2, "the scheduler knows of the last end"


def test_a_sample_that_the_scheduler_has_ended_is_not_aborted(memory_engine, submit):
    events = submit(n=2)
    memory_engine.say(events, "a", sample_index=0, finish="length")
    memory_engine.say(events, "b", sample_index=1, finish="length")
    assert len(memory_engine.sent) == 1, "nothing but the request"


def test_max_tokens_is_the_rest_of_the_context(memory_engine, submit):
    submit(range(48), max_tokens=None)
    submit(range(48), max_tokens=5000)
    assert [request.params.max_tokens for request in memory_engine.sent] == [2000, 2000]
    with pytest.raises(RequestError, match="max_tokens is 5000") as caught:
        submit(range(48), max_tokens=5000, exact_max_tokens=True)
    assert caught.value.code == "context_length_exceeded"


def test_a_prompt_that_fills_the_context_is_refused(memory_engine, submit):
    with pytest.raises(RequestError, match="2048 tokens") as caught:
        submit([5] * 2048)
    assert caught.value.code == "context_length_exceeded"
    assert memory_engine.sent == []


@pytest.mark.parametrize("token_id", [400, 401, -1, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused_in_every_field(memory_engine, submit, token_id):
    with pytest.raises(RequestError, match="prompt"):
        submit([5, token_id])
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        with pytest.raises(RequestError, match=name):
            submit(**{name: {token_id: 1.0} if name == "logit_bias" else [token_id]})
    assert memory_engine.sent == []


def test_seeds_are_drawn_reproducibly_and_differ(byte_tokenizer):
    def seeds() -> list[int]:
        running = FrontendInMemory(byte_tokenizer)
        for _ in range(3):
            running.core.submit(array("i", [5]), SamplingParams(), Events())
        running.engine.close()
        return [request.params.seed for request in running.sent]

    assert seeds() == seeds()
    assert len(set(seeds())) == 3


def test_abort_ends_with_what_there_is(memory_engine, submit):
    events = submit(stop="DEF")
    memory_engine.say(events, "ABC DE")
    memory_engine.core.abort(0)
    assert events.end.samples[0].finish_reason == "abort"
    assert events.text() == events.end.samples[0].text == "ABC DE"
    assert [list(sent.request_ids) for sent in memory_engine.sent[1:]] == [[0]]


def test_aborts_of_what_is_not_live_and_late_tokens_are_ignored(memory_engine, submit):
    events = submit()
    memory_engine.core.abort(0)
    memory_engine.core.abort(0)
    memory_engine.core.abort(77)
    memory_engine.tokens(0, [5], finish="length")
    memory_engine.tokens(77, [5])
    memory_engine.core.handle(m.RequestFailed(0, "late", "late"))
    assert isinstance(events.end, Final)
    assert len(memory_engine.sent) == 2


def test_a_failure_of_the_scheduler_is_the_end(memory_engine, submit):
    events = submit()
    memory_engine.core.handle(m.RequestFailed(0, "queue_full", "too many wait", 429, None, 500))
    assert (events.end.code, events.end.status, events.end.retry_after_ms) == ("queue_full", 429, 500)


def test_a_broken_sample_fails_its_request_alone(memory_engine, submit):
    broken, good = submit(n=2), submit()
    finish = (m.SampleFinish(0, "error", "the logits are not numbers"),)
    memory_engine.core.handle(
        m.TokensOut(
            request_ids=array("i", [0, 1]),
            token_ids=array("i", [5]),
            token_counts=array("B", [0, 1]),
            finishes=finish,
        )
    )
    assert "not numbers" in str(broken.end)
    assert good.ends == []
    assert list(memory_engine.sent[-1].request_ids) == [0]


@pytest.mark.parametrize("fields", [{}, {"cached_counts": array("i", [0, 0])}], ids=["plain step", "any step"])
def test_a_mistake_of_ours_costs_one_request(memory_engine, submit, monkeypatch, fields):
    broken, good = submit(), submit()
    monkeypatch.setattr(broken.request.samples[0], "_detokenizer", None)
    step = m.TokensOut(request_ids=array("i", [0, 1]), token_ids=array("i", [40, 41]), **fields)
    memory_engine.core.handle(step)
    memory_engine.core.handle(step)
    assert (broken.end.code, broken.end.status) == ("internal_error", 500)
    assert len(good.deltas) == 2
    assert list(memory_engine.sent[-1].request_ids) == [0]


def test_a_plain_step_may_tell_of_preemptions(memory_engine, submit):
    events = submit()
    memory_engine.tokens(0, [40], preemption_counts=array("B", [2]))
    assert (events.request.preemption_count, len(events.deltas)) == (2, 1)


def test_a_dead_engine_ends_every_request_and_takes_no_more(memory_engine, submit):
    events = [submit() for _ in range(3)]
    memory_engine.core.fail_all("worker-0 failed: out of memory")
    assert [(e.end.code, e.end.status) for e in events] == [("engine_dead", 503)] * 3
    with pytest.raises(RequestError, match="out of memory"):
        submit()
    assert not memory_engine.engine.health().ok


def test_a_draining_engine_takes_no_more(memory_engine, submit):
    events = submit()
    memory_engine.core.drain()
    with pytest.raises(RequestError, match="shutting down"):
        submit()
    memory_engine.say(events, "a", finish="length")
    assert isinstance(events.end, Final)


def test_request_numbers_are_not_given_out_twice(memory_engine, submit):
    submit()
    memory_engine.core._next_id = 2**31 - 1
    assert [submit().request.request_id for _ in range(2)] == [2**31 - 1, 1]


def test_log_probabilities_join_to_the_text(memory_engine, submit):
    events = submit(logprobs=1)
    ids = list(memory_engine.engine.tokenizer.encode("a🌊b"))
    entries = tuple(
        m.TokenLogprobs(row, -0.5 * row, 1, array("i", [token_id]), array("f", [-0.5]))
        for row, token_id in enumerate(ids)
    )
    memory_engine.tokens(0, ids, logprobs=entries, finish="length")
    sample = events.end.samples[0]
    assert "".join(entry.text for entry in sample.logprobs) == sample.text == "a🌊b"
    assert b"".join(entry.raw for entry in sample.logprobs).decode() == sample.text
    assert [entry.logprob for entry in sample.logprobs] == [-0.5 * row for row in range(len(ids))]
    assert sample.logprobs[0].top[0].text == "a"
    assert [entry for delta in events.deltas for entry in delta.logprobs] == list(sample.logprobs)


def test_log_probabilities_of_the_prompt(memory_engine, submit):
    events = submit("a🌊b", prompt_logprobs=0)
    ids = events.request.prompt_token_ids
    entries = tuple(m.TokenLogprobs(position, -1.0, 3, array("i"), array("f")) for position in range(1, len(ids)))
    memory_engine.tokens(0, [5], prompt_logprobs=((0, entries),), finish="length")
    found = list(events.end.prompt_logprobs)
    assert found[0] is None
    assert "a" + "".join(entry.text for entry in found[1:]) == "a🌊b"


def test_deltas_gather_to_the_stream_interval(byte_tokenizer, submit):
    engine = FrontendInMemory(byte_tokenizer, stream_interval=4)
    events = submit(engine=engine)
    for _ in range(10):
        engine.tokens(0, [40])
    engine.tokens(0, [40], finish="length")
    engine.engine.close()
    assert [len(delta.token_ids) for delta in events.deltas] == [1, 4, 4, 2]
    assert events.text() == events.end.samples[0].text


def test_without_detokenize_there_are_only_ids(memory_engine, submit):
    events = submit(detokenize=False)
    memory_engine.tokens(0, [40, 41], finish="length")
    assert (events.end.samples[0].text, list(events.end.samples[0].token_ids)) == ("", [40, 41])
    with pytest.raises(RequestError, match="detokenize"):
        submit(detokenize=False, stop="x")


def test_observers_see_each_end_once(memory_engine, submit):
    seen = []
    memory_engine.core.observers.append(lambda request, outcome: seen.append((request.request_id, outcome)))
    memory_engine.say(submit(), "a", finish="length")
    submit()
    memory_engine.core.abort(1)
    submit()
    memory_engine.core.fail_all("gone")
    assert seen == [(0, "length"), (1, "abort"), (2, "engine_dead")]


def test_a_timeout_becomes_a_deadline(memory_engine, submit):
    submit(timeout_s=5.0)
    assert memory_engine.sent[0].deadline_s == pytest.approx(memory_engine.sent[0].arrived_at_s + 5)


TEXTS = st.text(alphabet="abé🌊 !", min_size=1, max_size=12)


@given(data=st.data())
def test_any_course_of_events_ends_each_request_once(byte_tokenizer, data):
    """Streams of several requests with stop strings, aborts, ends and a dead engine: deltas join to the results."""
    engine = FrontendInMemory(byte_tokenizer)
    everything = []
    for text in data.draw(st.lists(TEXTS, min_size=1, max_size=4)):
        events = Events()
        stop = data.draw(st.sampled_from([(), ("!",), ("b!", "a")]))
        params = SamplingParams(max_tokens=64, n=data.draw(st.integers(1, 2)), stop=stop)
        events.request = engine.core.submit(byte_tokenizer.encode(text), params, events)
        everything.append(events)
    for _ in range(data.draw(st.integers(0, 12))):
        request_id = data.draw(st.integers(0, len(everything)))
        if data.draw(st.integers(0, 9)) == 0:
            engine.core.abort(request_id)
        else:
            ids = data.draw(st.lists(st.integers(0, 320), max_size=3))
            finish = data.draw(st.sampled_from([None, None, None, "stop", "length"]))
            engine.tokens(request_id, ids, finish=finish, sample_index=data.draw(st.integers(0, 1)))
    engine.core.fail_all("over")
    engine.engine.close()
    for events in everything:
        if isinstance(events.end, Final):
            for sample in events.end.samples:
                assert events.text(sample.index) == sample.text
                own = [delta for delta in events.deltas if delta.sample_index == sample.index]
                assert [i for delta in own for i in delta.token_ids] == list(sample.token_ids)
    assert engine.core.live_count == 0


def test_ids_that_the_model_lacks_go_no_further(memory_engine, submit, monkeypatch):
    """A tokenizer may hold added tokens, and a folder may name end ids, that lie beyond the embedding."""
    tokenizer = memory_engine.engine.tokenizer
    monkeypatch.setattr(tokenizer, "end_token_ids", (1, 100_000))
    monkeypatch.setattr(tokenizer, "bad_word_ids", lambda _: ((5,), (5, 100_000), (100_000,)))
    submit(bad_words=("x",), min_tokens=1)
    assert memory_engine.sent[0].end_token_ids == (1,)
    assert memory_engine.sent[0].bad_token_ids == ((5,),)


def test_allowed_ids_of_which_nothing_is_left_are_refused(submit, memory_engine, monkeypatch):
    """They passed every check and came back as a failure of the server."""
    monkeypatch.setattr(memory_engine.engine.tokenizer, "bad_word_ids", lambda _: ((5,), (6, 7)))
    for params in ({"min_tokens": 1, "allowed_token_ids": [1]}, {"bad_words": ["x"], "allowed_token_ids": [5]}):
        with pytest.raises(RequestError, match="leave none of allowed_token_ids") as caught:
            submit(**params)
        assert (caught.value.status, caught.value.param) == (400, "allowed_token_ids")
    submit(allowed_token_ids=[1])
    submit(allowed_token_ids=[7], bad_words=["x"], min_tokens=1)


def test_a_bad_word_of_too_many_tokens_is_refused_by_name(memory_engine, submit):
    with pytest.raises(RequestError, match="1024 tokens") as caught:
        submit(bad_words=("🌊" * 1100,))
    assert caught.value.param == "bad_words"
    assert (memory_engine.sent, memory_engine.core.live_count) == ([], 0)
    submit(bad_words=("sea",))
    assert memory_engine.sent[0].bad_token_ids


def test_counters_go_on_after_a_restart(memory_engine):
    core = memory_engine.core
    parts = array("i", [10] * 6)
    core.handle(
        m.EngineStats(steps=100, output_tokens=50, running_count=3, parts_us=parts, step_sizes=array("i", [100]))
    )
    core.suspend("worker-0 was killed", 1)
    assert (core.stats.steps, core.stats.running_count) == (100, 0)
    core.handle(m.EngineStats(steps=7, output_tokens=5, running_count=2, parts_us=parts, step_sizes=array("i", [7])))
    assert (core.stats.steps, core.stats.output_tokens, core.stats.running_count) == (107, 55, 2)
    assert core.figures.step_totals_us()["step_plan_us"] == 1070


@pytest.mark.parametrize("way", ["finish", "abort", "fail", "fail_all", "not sent"])
def test_nothing_of_a_request_stays_in_the_core_when_it_has_ended(memory_engine, submit, monkeypatch, way):
    core = memory_engine.core

    def no_memory(request) -> None:
        raise MemoryError

    if way == "not sent":
        monkeypatch.setattr(core._outbox, "request", no_memory)
        sink = Events()
        with pytest.raises(MemoryError):
            core.submit(array("i", [5]), SamplingParams(max_tokens=9), sink)
    else:
        sink = submit()
        number = sink.request.request_id
        memory_engine.tokens(number, [70])
        match way:
            case "finish":
                memory_engine.tokens(number, [71], finish="length")
            case "abort":
                core.abort(number)
            case "fail":
                core.fail(number, RequestError("broken"))
            case _:
                core.fail_all("worker-0 was killed")
        assert sink.end
    left = weakref.ref(sink)
    del sink
    gc.collect()
    assert left() is None


def test_what_a_message_has_had_written_goes_out_even_if_it_ends_the_frontend(memory_engine, submit, monkeypatch):
    core, flushed = memory_engine.core, []
    core.after_tokens.append(lambda: flushed.append(True))
    number = submit().request.request_id
    memory_engine.tokens(number, [70])
    assert flushed == [True]

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(core._intake, "take", no_memory)
    with pytest.raises(MemoryError):
        memory_engine.tokens(number, [71])
    assert flushed == [True, True]
