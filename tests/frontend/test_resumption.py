"""Requests whose frontend was lost, without sockets: what a client keeps, and how the next frontend goes on from it."""

import dataclasses
from array import array

import pytest

from benchmarks.fake_scheduler import LIMITS
from common import client_messages as wire
from common import messages as m
from common.client_messages import SampleSoFar
from common.errors import EngineDeadError, RequestError
from frontend.client_resumption import Kept
from frontend.client_state import ClientState
from frontend.events import Final
from frontend.request_checks import EMBEDDING_PARAMS
from tests.support.frontend_in_memory import Events, FrontendInMemory

# -- the frontend ----------------------------------------------------------------------------------------------------

CASES = {
    "plain": ("sea", "length", {}),
    "characters of several tokens": ("ï 海🌊", "length", {}),
    "an end within a character": ("sea 🌊", "length", {"max_tokens": 7}),
    "a stop string that almost comes": ("DEFG DEFK", "length", {"stop": "DEFGHIJ"}),
    "a stop string": ("K DEFGHIJK", None, {"stop": "DEFGHIJ"}),
    "a stop string that is shown": ("K DEFG", None, {"stop": ("DEFG", "x"), "include_stop_str_in_output": True}),
    "a stop string too early": ("DEFG DEF", "length", {"stop": "DEFG", "min_tokens": 6}),
    "an end token": ("sea\0", "stop", {}),
    "an end token that is shown": ("sea\0", "stop", {"include_stop_str_in_output": True, "skip_special_tokens": False}),
    "a stop token": ("sea", "stop", {"stop_token_ids": True}),
    "no text": ("sea", "length", {"detokenize": False}),
    "an answer": (" a sea", "length", {"starts_text": True}),
    "log probabilities": ("sï海", "length", {"logprobs": 1}),
}
END_ID = 1


def spelled(engine: FrontendInMemory, text: str) -> "array[int]":
    """A token for each byte; an end token for a null."""
    tokenizer = engine.engine.tokenizer
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return array("i", [by_byte[bytes([byte])] if byte else END_ID for byte in text.encode()])


def entry(row: int, token_id: int) -> m.TokenLogprobs:
    return m.TokenLogprobs(row, -0.5, 2, array("i", [token_id, 5]), array("f", [-0.25, -1.0]))


def speak(engine: FrontendInMemory, events: Events, ids, finish, *, start: int = 0, sample_index: int = 0) -> None:
    """The model says these tokens from `start` on, one a step, unless the sample ends before."""
    wants_logprobs = events.request.params.logprobs is not None
    for place in range(start, len(ids)):
        if events.request.samples[sample_index].finish_reason is not None:
            return
        more = {"logprobs": (entry(0, ids[place]),)} if wants_logprobs else {}
        last = finish if place == len(ids) - 1 else None
        engine.tokens(events.request.request_id, [ids[place]], finish=last, sample_index=sample_index, **more)


def kept_of(deltas) -> Kept:
    kept = Kept(wire.Generate(request_id="a", prompt="x"), 0.0)
    for delta in deltas:
        kept.add(delta)
    return kept


def so_far(deltas) -> tuple[SampleSoFar, ...]:
    """What a client that has got these deltas asks for."""
    [resume] = kept_of(deltas).messages(0.0)
    return resume.samples


def plain(final: Final) -> tuple:
    """A result without its times."""
    return final.samples, final.usage, list(final.prompt_token_ids)


@pytest.fixture
def engines(byte_tokenizer):
    """One frontend after the other."""
    made = []

    def make(**server) -> FrontendInMemory:
        made.append(FrontendInMemory(byte_tokenizer, **server))
        return made[-1]

    yield make
    for running in made:
        running.engine.close()


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(("text", "finish", "params"), CASES.values(), ids=CASES)
def test_text_goes_on_after_any_delta(engines, submit, text, finish, params, interval):
    first = engines(stream_interval=interval)
    token_ids = spelled(first, text)[: params.get("max_tokens")]
    if "stop_token_ids" in params:
        params = params | {"stop_token_ids": (token_ids[-1],)}
    params = {"seed": 5, "max_tokens": len(token_ids), **params}
    whole = submit("the sea", engine=first, **params)
    speak(first, whole, token_ids, finish)
    assert len(whole.deltas) >= 2 and whole.end
    for count in range(len(whole.deltas) + 1):
        old = whole.deltas[:count]
        second = engines(stream_interval=interval)
        events = submit("the sea", engine=second, resumed=so_far(old), **params)
        known = array("i", [token_id for delta in old for token_id in delta.token_ids])
        if old and old[-1].finish_reason is not None:
            assert second.sent == [] and events.deltas == [], "only its end is missing"
        else:
            [sent] = second.sent
            assert sent == dataclasses.replace(first.sent[0], outputs=(known,), arrived_at_s=sent.arrived_at_s)
            speak(second, events, token_ids, finish, start=len(known))
        joined = [*old, *events.deltas]
        assert "".join(delta.text for delta in joined) == whole.text(), f"cut after {count} deltas"
        assert [i for d in joined for i in d.token_ids] == [i for d in whole.deltas for i in d.token_ids]
        kept, end = kept_of(joined), events.end
        assert plain(dataclasses.replace(end, samples=kept.completed(end).samples)) == plain(whole.end)
        assert second.core.live_count == 0


def test_samples_go_on_that_have_not_ended(engines, submit):
    first, second = engines(), engines()
    old = submit("the sea", engine=first, n=3, seed=5, max_tokens=9)
    token_ids = spelled(first, "abc")
    speak(first, old, token_ids, "stop", sample_index=2)
    speak(first, old, token_ids[:1], None, sample_index=0)
    events = submit("the sea", engine=second, n=3, seed=5, max_tokens=9, resumed=so_far(old.deltas))
    assert second.sent[0].outputs == (token_ids[:1], array("i"), None)
    speak(second, events, token_ids, "length", start=1)
    speak(second, events, token_ids, "length", sample_index=1)
    assert [(sample.text, sample.finish_reason) for sample in events.end.samples] == [
        ("abc", "length"), ("abc", "length"), ("abc", "stop")]  # fmt: skip
    assert (events.text(0), events.text(1), events.text(2)) == ("bc", "abc", "")
    assert events.end.usage.completion_tokens == 3 * len(token_ids)


def test_the_leading_space_of_an_answer_is_not_stripped_twice(fallback_tokenizer, submit):
    engine = FrontendInMemory(fallback_tokenizer)
    love, you = fallback_tokenizer.raw.token_to_id("▁love"), fallback_tokenizer.raw.token_to_id("▁you")
    known = [SampleSoFar(0, array("i", [love]))]
    events = submit("the sea", engine=engine, starts_text=True, max_tokens=2, resumed=known)
    engine.tokens(events.request.request_id, [you], finish="length")
    assert (events.text(), events.end.samples[0].text) == (" you", "love you")
    engine.engine.close()


def test_nothing_has_come_yet(engines, submit):
    """It is no new request either: a full queue does not refuse it."""
    engine = engines()
    submit("the sea", engine=engine, n=2, resumed=())
    submit("the sea", engine=engine, pooling="mean", resumed=(), **dataclasses.asdict(EMBEDDING_PARAMS) | {"n": 1})
    assert [sent.outputs for sent in engine.sent] == [(array("i"), array("i")), (array("i"),)]


def test_a_seed_that_nobody_named_is_drawn_again(engines, submit):
    engine = engines()
    events = submit("the sea", engine=engine, resumed=[SampleSoFar(0, array("i", [5]))])
    assert engine.sent[0].params.seed is not None
    speak(engine, events, [5, 6], "length", start=1)
    assert list(events.end.samples[0].token_ids) == [5, 6]


def test_what_goes_on_may_lose_the_scheduler_too(engines, submit):
    engine = engines()
    events = submit("the sea", engine=engine, resumed=[SampleSoFar(0, array("i", [5]))])
    engine.tokens(events.request.request_id, [6])
    engine.core.suspend("worker-0 was killed", 2)
    late = submit("the sea", engine=engine, resumed=[SampleSoFar(0, array("i", [7]))])
    engine.core.handle(LIMITS)
    assert [sent.outputs for sent in engine.sent[1:]] == [(array("i", [5, 6]),), (array("i", [7]),)]
    assert late.ends == events.ends == []


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([(0, [5]), (0, [6])], "an index occurs twice"),
        ([(1, [5])], "sample 1: the request has 1"),
        ([(0, [LIMITS.vocab_size])], "ids are 0 to 399"),
        ([(0, [-1])], "ids are 0 to 399"),
        ([(0, [5] * 4)], "4 tokens, where the request may have 4"),
        ([(0, [5] * 5, "length")], "5 tokens, where the request may have 4"),
        ([(0, [5], "error")], "cannot have ended with 'error'"),
    ],
)  # fmt: skip
def test_what_cannot_have_come_is_refused(engines, submit, samples, text):
    engine = engines()
    resumed = [SampleSoFar(index, array("i", ids), *finish) for index, ids, *finish in samples]
    with pytest.raises(RequestError, match=text) as caught:
        submit("the sea", engine=engine, max_tokens=4, resumed=resumed)
    assert (caught.value.param, engine.sent, engine.core.live_count) == ("samples", [], 0)


@pytest.mark.parametrize(("stop", "most"), [((), 12), (("x", "y", "z"), 3)])
def test_more_than_can_be_read_in_a_moment_is_refused(engines, submit, monkeypatch, stop, most):
    monkeypatch.setattr("frontend.request_checks.TAKEN_UP_LIMIT", 12)
    engine = engines()
    submit("the sea", engine=engine, stop=stop, max_tokens=50, resumed=[SampleSoFar(0, array("i", [5] * most))])
    halves = [SampleSoFar(0, array("i", [5] * most)), SampleSoFar(1, array("i", [5]))]
    with pytest.raises(RequestError, match="the engine goes on from 12 at most") as caught:
        submit("the sea", engine=engine, stop=stop, max_tokens=50, n=2, resumed=halves)
    assert (caught.value.code, caught.value.status) == ("engine_restarted", 503)
    assert (len(engine.sent), engine.core.live_count) == (1, 1)


def test_log_probabilities_of_a_prompt_are_lost_once_tokens_have_come(engines, submit):
    engine = engines()
    submit("the sea", engine=engine, prompt_logprobs=1, resumed=())
    assert engine.sent[0].params.prompt_logprobs == 1
    with pytest.raises(RequestError, match="log probabilities were lost") as caught:
        submit("the sea", engine=engine, prompt_logprobs=1, resumed=[SampleSoFar(0, array("i", [5]))])
    assert (caught.value.code, caught.value.status) == ("engine_restarted", 503)


# -- the client ------------------------------------------------------------------------------------------------------

LOST = EngineDeadError("the connection is lost")


def welcome(engine: str = "it") -> bytes:
    return wire.Welcome(2, ("model",), 2048, 400, "serving", engine).to_wire()


@pytest.fixture
def client():
    """The state of a client that is connected to an engine which comes back."""
    state = ClientState()
    assert state.take(welcome()) == []
    return state


def ask(state: ClientState, message: wire.FromClient):
    inbox = state.open(message.request_id)
    state.note_sent(inbox, message)
    return inbox


def hear(state: ClientState, request_id: str, token_ids, **more) -> None:
    delta = wire.Delta(0, "x" * len(token_ids), array("i", token_ids), **more)
    assert state.take(wire.Deltas(((request_id, delta),)).to_wire()) == ()


GENERATE = wire.Generate(request_id="g", prompt="the sea", params={"max_tokens": 9})


def test_a_client_asks_the_same_engine_for_all_that_it_had(client):
    embed, ping = wire.Embed(request_id="e", prompt="x"), wire.Ping("p")
    silent, waiting = dataclasses.replace(GENERATE, request_id="s", stream=False), client.open("not sent yet")
    inboxes = [ask(client, message) for message in (GENERATE, embed, ping, silent)]
    hear(client, "g", [5, 6])
    hear(client, "g", [7], finish_reason="stop", stop_reason=7)
    client.lose(LOST)
    assert client.is_resuming
    assert client.take(welcome()) == [
        wire.Resume(GENERATE, (SampleSoFar(0, array("i", [5, 6, 7]), "stop", 7),)),
        wire.Resume(embed),
        ping,
        wire.Resume(silent),
    ]
    assert not client.is_resuming
    assert [len(inbox.replies) for inbox in (*inboxes, waiting)] == [2, 0, 0, 0, 0]


def test_what_has_ended_is_not_asked_for_again(client):
    ask(client, wire.Ping("p"))
    client.take(wire.Pong("p").to_wire())
    client.lose(LOST)
    assert not client.is_resuming and client.take(welcome()) == []


@pytest.mark.parametrize("came", ["another", ""])
def test_another_engine_is_not_asked(client, came):
    inbox = ask(client, GENERATE)
    client.lose(LOST)
    assert client.take(welcome(came)) == []
    assert list(inbox.replies) == [LOST] and not client.is_resuming
    again = ask(client, GENERATE)
    client.lose(LOST)
    assert client.is_resuming == bool(came) and list(again.replies) == ([] if came else [LOST])


def test_an_engine_that_does_not_come_back_ends_what_it_had_at_once():
    state = ClientState()
    state.take(welcome(""))
    sent, waiting = ask(state, GENERATE), state.open("waits for a connection")
    state.lose(LOST)
    assert list(sent.replies) == [LOST] and not state.is_resuming
    assert not waiting.replies and state.is_live("waits for a connection")


def test_a_client_gives_up(client):
    inbox = ask(client, GENERATE)
    client.lose(LOST)
    client.give_up()
    assert list(inbox.replies) == [LOST] and not client.is_live("g")
    inbox = ask(client, GENERATE)
    client.lose(LOST)
    assert client.take(wire.ErrorReply("", "too_many_connections", "no room", None, None, 503).to_wire()) == ()
    assert "the connection is lost, and it cannot be asked again: no room" in str(inbox.replies[0])
    assert not client.is_resuming


def test_an_abort_that_may_have_been_lost_is_sent_again(client):
    ask(client, GENERATE)
    client.note_abort("g")
    client.note_abort("unknown")
    client.lose(LOST)
    assert client.take(welcome()) == [wire.Resume(GENERATE), wire.Abort("g")]


def test_a_request_that_may_be_the_cause_is_not_sent_for_ever(client):
    poison, good = ask(client, GENERATE), ask(client, dataclasses.replace(GENERATE, request_id="good"))
    hear(client, "g", [5])
    for loss in (1, 2, 3):
        assert not any(isinstance(reply, RequestError) for reply in poison.replies), loss
        hear(client, "good", [5])
        client.lose(LOST)
        client.lose(LOST)  # before it could be asked for again
        client.take(welcome())
    assert poison.replies[-1].code == "engine_restarted" and not client.is_live("g")
    assert client.is_live("good") and len(good.replies) == 3


def test_who_waits_is_not_the_cause():
    kept = Kept(GENERATE, 0.0)
    for now_s in (100.0, 200.0, 300.0):
        assert kept.note_loss(now_s)
        assert kept.messages(now_s + 1.0) == [wire.Resume(GENERATE)]
    assert kept.note_loss(302.0)
    kept.messages(303.0)
    assert not kept.note_loss(304.0)


def test_tokens_come_on_the_way_where_only_the_end_is_wanted(client):
    quiet = dataclasses.replace(GENERATE, stream=False)
    scored = dataclasses.replace(quiet, request_id="s", params={"prompt_logprobs": 1})
    inboxes = {message.request_id: client.open(message.request_id) for message in (quiet, scored)}
    sent = [client.streamed(inboxes[message.request_id], message) for message in (quiet, scored)]
    assert sent == [GENERATE, scored], "log probabilities of a prompt would be lost with the first token"
    client.note_sent(inboxes["g"], sent[0])
    hear(client, "g", [5, 6])
    assert not inboxes["g"].replies
    client.lose(LOST)
    assert client.take(welcome()) == [wire.Resume(GENERATE, (SampleSoFar(0, array("i", [5, 6])),))]
    for_good = ClientState()
    for_good.take(welcome(""))
    assert for_good.streamed(for_good.open("g"), quiet) == quiet


def test_a_result_is_whole_although_the_engine_knows_only_the_rest(client):
    inbox = ask(client, GENERATE)
    logprobs = [wire.TokenLogprob(token_id, "x", b"x", -0.5, 1) for token_id in (5, 6)]
    hear(client, "g", [5], logprobs=logprobs[:1])
    client.lose(LOST)
    client.take(welcome())
    hear(client, "g", [6], logprobs=logprobs[1:])
    sample = wire.SampleResult(0, "xx", array("i", [5, 6]), "length", None, (logprobs[1],))
    client.take(wire.Final(request_id="g", samples=(sample,), prompt_token_ids=array("i")).to_wire())
    assert inbox.replies[-1].samples == (dataclasses.replace(sample, logprobs=tuple(logprobs)),)


def test_of_a_timeout_is_left_what_has_not_passed():
    kept = Kept(dataclasses.replace(GENERATE, timeout_ms=5000), 100.0)
    assert [kept.messages(now_s)[0].request.timeout_ms for now_s in (102.0, 200.0)] == [3000, 1]


def test_log_probabilities_from_before_and_after_a_loss_are_joined():
    logprobs = [wire.TokenLogprob(token_id, "x", b"x", -0.5, 1) for token_id in (5, 6, 7)]
    kept = kept_of([wire.Delta(0, "x", array("i", [i]), [one]) for i, one in zip((5, 6, 7), logprobs, strict=True)])
    ids = array("i", [5, 6, 7])
    new = wire.SampleResult(0, "xxx", ids, "length", None, tuple(logprobs[2:]))
    final = wire.Final(request_id="g", samples=(new, dataclasses.replace(new, index=1)), prompt_token_ids=ids)
    assert kept.completed(final).samples == (dataclasses.replace(new, logprobs=tuple(logprobs)), final.samples[1])
    unasked = dataclasses.replace(final, samples=(dataclasses.replace(new, logprobs=None),))
    assert kept.completed(unasked) == unasked
