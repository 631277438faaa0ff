"""Long texts are worked on in processes, middling ones in threads, and nobody can tell from the result."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import threading
from array import array

import pytest

from common.config import EngineConfig, ModelOptions, ServerOptions
from common.errors import RequestError
from common.wire import TEXT_LIMIT_BYTES, pack
from frontend import Client, text_pool, text_process, text_work
from frontend.large_json import parse_large
from frontend.prompt import COUNTED_LIMIT, ChatPrompt, size_of
from frontend.text_messages import DecodeIds, EncodeChat, EncodeText, Text, TextRefused, TokenIds
from frontend.text_process import result_of
from frontend.text_work import TextWork
from frontend.tokenizer import Tokenizer
from tests.support import tiny
from tests.support.server import wait_for_exit

LONG = "the open sea 海 🌊 " * 2000
BODY = json.dumps({"prompt": list(range(10_000)), "user": LONG, "seed": None}).encode()
CHAT = ChatPrompt(messages=[{"role": "user", "content": LONG}, {"role": "assistant", "content": "yes"}])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("m")
    tiny.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return Tokenizer.load(model_dir)


class Work:
    """A `TextWork` on a loop of its own."""

    def __init__(self, model_dir, run_dir, workers: int, template: str = "") -> None:
        self.config = EngineConfig(
            server=ServerOptions(frontend_workers=workers),
            model=ModelOptions(chat_template=template),
            run_dir=str(run_dir),
            model_dir=str(model_dir),
        )
        self.runner = asyncio.Runner()
        self.texts = self.run(self._make(Tokenizer.load(model_dir, template)))

    async def _make(self, tokenizer) -> TextWork:
        return TextWork(self.config, tokenizer)

    def run(self, work):
        return self.runner.run(work)

    def processes(self) -> dict:
        return self.texts._pool._processes

    def close(self) -> None:
        async def end() -> None:
            self.texts.close()

        self.run(end())
        self.runner.close()


@pytest.fixture
def make_work(model_dir, tmp_path):
    made = []

    def make(workers: int = 1, template: str = "") -> Work:
        made.append(Work(model_dir, tmp_path, workers, template))
        return made[-1]

    yield make
    for work in made:
        work.close()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_do_not_tell_where_they_were_made(make_work, tokenizer, workers):
    work = make_work(workers)
    assert len(LONG) > text_work.THREAD_LIMIT

    async def all_kinds() -> list:
        texts = work.texts
        return await asyncio.gather(
            texts.encode(LONG, add_special_tokens=True),
            texts.encode(LONG + "\ud800", add_special_tokens=False),
            texts.encode("short", add_special_tokens=True),
            texts.encode_chat(CHAT, add_special_tokens=False),
            texts.decode(ids, skip_special_tokens=True),
            texts.parse(BODY, ("prompt",)),
        )

    ids = tokenizer.encode(LONG)
    long, odd, short, chat, text, body = work.run(all_kinds())
    assert long == ids
    assert odd == tokenizer.encode(LONG + "?", add_special_tokens=False)
    assert short == tokenizer.encode("short")
    assert chat == tokenizer.encode(tokenizer.render(CHAT), add_special_tokens=False)
    assert text == tokenizer.decode(ids)
    assert body == parse_large(BODY, ("prompt",))
    assert body.token_ids == {"prompt": array("i", range(10_000))}
    if workers:
        assert 1 <= len(work.processes()) <= workers


def test_a_chat_that_the_template_refuses_is_refused_by_the_process_too(make_work, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ raise_exception('only short chats') }}")
    work = make_work(template=str(tmp_path / "t.jinja"))
    with pytest.raises(RequestError, match="only short chats") as caught:
        work.run(work.texts.encode_chat(CHAT, add_special_tokens=False))
    assert (caught.value.param, caught.value.status) == ("messages", 400)
    assert work.processes(), "it was not done in a process"


def test_what_no_message_holds_is_done_in_a_thread(make_work, tokenizer):
    work = make_work()
    chat = ChatPrompt(messages=CHAT.messages, template_kwargs={"number": 2**70})
    ids = work.run(work.texts.encode_chat(chat, add_special_tokens=False))
    assert ids == tokenizer.encode(tokenizer.render(CHAT), add_special_tokens=False)


def test_a_result_that_cannot_be_had_is_an_error_for_whoever_waits():
    """Nobody told them, so they waited for ever."""

    async def settled():
        future = asyncio.get_running_loop().create_future()
        text_pool._settle(future, lambda: 1 // 0)
        return future

    assert isinstance(asyncio.run(settled()).exception(), ZeroDivisionError)


def test_the_work_of_a_process_that_is_killed_is_done_all_the_same(make_work, tokenizer, monkeypatch):
    work = make_work()

    async def interrupted():
        waiting = asyncio.ensure_future(work.texts.encode(LONG, add_special_tokens=True))
        await asyncio.sleep(0)
        [process] = work.processes().values()
        os.kill(process.child.pid, signal.SIGKILL)
        return await waiting

    for _ in range(text_pool.FAILURES_LIMIT):
        assert work.run(interrupted()) == tokenizer.encode(LONG)
        assert not work.processes()
    assert work.run(work.texts.encode(LONG, add_special_tokens=True)) == tokenizer.encode(LONG)
    assert not work.processes(), "threads take over for good"


@pytest.fixture
def hung_process(make_work, tokenizer, monkeypatch):
    """Text work whose first process has been stopped, and which checks often whether a process hangs."""
    monkeypatch.setattr(text_pool, "CHECK_INTERVAL_S", 0.01)
    work = make_work()
    assert work.run(work.texts.encode(LONG, add_special_tokens=True)) == tokenizer.encode(LONG)
    [process] = work.processes().values()
    os.kill(process.child.pid, signal.SIGSTOP)
    monkeypatch.setattr(text_pool, "PATIENCE_S", 1.0)
    return work, process


def test_the_work_of_a_process_that_hangs_is_done_by_another(hung_process, tokenizer):
    work, process = hung_process

    async def three() -> list:
        return await asyncio.gather(*(work.texts.encode(LONG, add_special_tokens=True) for _ in range(3)))

    assert work.run(three()) == [tokenizer.encode(LONG)] * 3
    assert process not in work.processes().values()
    wait_for_exit(process.child.pid, "text-0")
    assert work.processes(), "threads did the work, for which everybody waits"


@pytest.mark.timeout(30)
def test_a_large_body_waits_no_longer_for_a_process_that_hangs_than_parsing_may_take(hung_process):
    """It was given the time of a text as long, three minutes for eight megabytes."""
    work, process = hung_process
    body = b'{"user": "' + b"x" * 2_000_000 + b'"}'

    async def both() -> list:
        return await asyncio.gather(*(work.texts.parse(body, ()) for _ in range(2)))

    assert [len(parsed.values["user"]) for parsed in work.run(both())] == [2_000_000] * 2
    assert process not in work.processes().values() and work.processes()


def test_a_text_on_which_processes_hang_is_refused_and_no_other(hung_process, tokenizer, monkeypatch):
    work, _ = hung_process
    is_hung = text_pool.TextProcess.is_hung.fget
    slow_size = len(LONG) + 1

    def hangs(process) -> bool:
        first = next(iter(process.jobs.values()), (0, None))[0]
        return first == slow_size or is_hung(process)

    monkeypatch.setattr(text_pool.TextProcess, "is_hung", property(hangs))

    async def slow_and_good() -> list:
        texts = (LONG + "x", LONG)
        jobs = [work.texts.encode(text, add_special_tokens=True) for text in texts]
        return await asyncio.gather(*jobs, return_exceptions=True)

    slow, good = work.run(slow_and_good())
    assert isinstance(slow, RequestError) and (slow.code, slow.status) == ("text_too_slow", 503)
    assert good == tokenizer.encode(LONG)


def test_a_body_of_any_depth_is_answered(make_work):
    """What a text process could just read, the frontend, deeper in its own calls, could not: nobody was answered."""
    work = make_work()
    padding = b'{"user": "' + b"x" * text_work.THREAD_LIMIT + b'", "a": '

    async def parsed(depth: int) -> bool:
        try:
            await work.texts.parse(padding + b"[" * depth + b"]" * depth + b"}", ())
        except RequestError as error:
            assert (str(error), error.status) == ("the body is nested too deeply", 400)
            return False
        return True

    async def all_depths() -> list[bool]:
        return await asyncio.gather(*(parsed(depth) for depth in [1, 100, 2000, *range(800, 1010)]))

    outcomes = work.run(all_depths())
    assert outcomes[:3] == [True, True, False] and outcomes[-1] is False
    assert work.processes(), "threads did it, in which all is as deep as in the test"


def test_a_result_that_cannot_be_read_is_an_error_for_whoever_waits(make_work, monkeypatch):
    work = make_work()

    def fails(self) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(TokenIds, "value", fails)
    with pytest.raises(MemoryError, match="none left"):
        work.run(work.texts.encode(LONG, add_special_tokens=True))


def test_a_chat_that_no_message_may_hold_costs_itself_and_not_the_process(make_work):
    """It ended the process: after three of them all long texts were worked on in threads, for good."""
    work = make_work()
    many = ChatPrompt(messages=[{"role": "user", "content": "x"}] * ((1 << 16) + 1))
    for _ in range(text_pool.FAILURES_LIMIT):
        with pytest.raises(RequestError, match="EncodeChat.messages: wanted an array of at most 65536 items") as caught:
            work.run(work.texts.encode_chat(many, add_special_tokens=False))
        assert caught.value.status == 400
    [process] = work.processes().values()
    assert process.child.exit_code is None


def test_an_answer_that_cannot_be_read_costs_its_own_request_alone(make_work, tokenizer):
    """It ended all text processes: after three of them all long texts were worked on in threads, for good."""
    work = make_work()

    async def one_of_two() -> list:
        both = [asyncio.ensure_future(work.texts.encode(LONG, add_special_tokens=True)) for _ in "ab"]
        await asyncio.sleep(0)
        work.texts._pool._on_result([pack([TokenIds.CODE, 1, "no ids"])])
        return await asyncio.gather(*both, return_exceptions=True)

    refused, ids = work.run(one_of_two())
    assert isinstance(refused, RequestError), refused
    assert (refused.code, refused.status) == ("internal_error", 500)
    assert str(refused).startswith("internal error: TokenIds.token_ids: wanted bytes")
    assert ids == tokenizer.encode(LONG)
    assert all(process.child.exit_code is None for process in work.processes().values()) and work.processes()


def test_a_refusal_that_no_message_may_hold_is_cut(make_work, tmp_path):
    """A template may put what it refuses into its text."""
    (tmp_path / "t.jinja").write_text("{{ raise_exception(messages[0].content) }}")
    work = make_work(template=str(tmp_path / "t.jinja"))
    chat = ChatPrompt(messages=[{"role": "user", "content": "x" * (TEXT_LIMIT_BYTES + 1)}])
    with pytest.raises(RequestError, match="^the chat template refuses this chat: x") as caught:
        work.run(work.texts.encode_chat(chat, add_special_tokens=False))
    assert (len(str(caught.value)), caught.value.status) == (text_process.REASON_LIMIT, 400)
    assert work.processes(), "it was not done in a process"


def test_an_answer_that_cannot_be_read_keeps_nobody_waiting(make_work, tokenizer):
    """It was dropped, and whoever wanted it waited for ever."""
    work = make_work()

    async def garbled():
        waiting = asyncio.ensure_future(work.texts.encode(LONG, add_special_tokens=True))
        await asyncio.sleep(0)
        work.texts._pool._on_result([b"garbage"])
        return await waiting

    assert work.run(garbled()) == tokenizer.encode(LONG)
    assert not work.processes()


def test_a_text_that_no_message_holds_is_refused(tokenizer, monkeypatch):
    ids = tokenizer.encode("the sea")
    monkeypatch.setattr(text_process, "RESULT_LIMIT_BYTES", 6)
    assert result_of(tokenizer, DecodeIds(2, ids, False)) == TextRefused(
        2, "token_ids: their text has more than 6 bytes", "invalid_parameter", "token_ids", 400
    )


def test_where_no_process_can_be_started_threads_do_the_work(make_work, tokenizer, monkeypatch):
    """Without memory or file descriptors the request ended with status 500."""

    def no_memory(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    assert (work := make_work()).run(work.texts.encode(LONG, add_special_tokens=True)) == tokenizer.encode(LONG)


def test_nobody_waiting_for_a_result_harms_nobody(make_work, tokenizer):
    work = make_work()

    async def given_up():
        waiting = asyncio.ensure_future(work.texts.encode(LONG, add_special_tokens=True))
        await asyncio.sleep(0)
        waiting.cancel()
        return await work.texts.encode(LONG, add_special_tokens=True)

    assert work.run(given_up()) == tokenizer.encode(LONG)


def test_more_text_than_may_wait_is_refused(make_work, monkeypatch):
    monkeypatch.setattr(text_work, "PENDING_LIMIT", 2 * len(LONG))
    work = make_work(0)

    async def four() -> list:
        jobs = [work.texts.encode(LONG, add_special_tokens=True) for _ in range(4)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    ends = [getattr(end, "status", None) for end in work.run(four())]
    assert ends == [None, None, 429, 429]
    assert work.run(work.texts.encode(LONG, add_special_tokens=True)), "what is done makes room"


@pytest.mark.parametrize("workers", [0, 1])
def test_whoever_waits_at_the_end_gets_an_error(make_work, monkeypatch, workers):
    work, encode, is_closed = make_work(workers), Tokenizer.encode, threading.Event()

    def late(*arguments, **options):
        assert is_closed.wait(60)
        return encode(*arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", late)  # by the threads; processes have their own

    async def end_meanwhile() -> list:
        waiting = [asyncio.ensure_future(work.texts.encode(LONG, add_special_tokens=True)) for _ in range(8)]
        await asyncio.sleep(0)
        work.texts.close()
        is_closed.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    ends = work.run(end_meanwhile())
    assert 503 in {getattr(end, "status", None) for end in ends}, ends
    assert all(getattr(end, "status", 503) == 503 for end in ends), ends


@pytest.mark.parametrize("token_ids", [[-1], [2**31], [5, -7]])
def test_ids_that_are_none_are_refused(make_work, token_ids):
    work = make_work(0)
    with pytest.raises(RequestError, match="token ids are numbers from 0"):
        work.run(work.texts.decode(token_ids, skip_special_tokens=False))


def test_the_size_of_a_prompt():
    assert size_of("abc", 10) == 3
    assert size_of([5, 6], 10) == 2
    chat = ChatPrompt(messages=[{"role": "user", "content": [{"type": "text", "text": "x" * 50}, 1]}])
    assert size_of(chat, 1000) == len("roleusercontenttypetexttext") + 50 + 1
    assert 20 <= size_of(chat, 20) <= 60
    many = ChatPrompt(messages=[{"role": "user", "content": "x" * 100}] * COUNTED_LIMIT)
    assert 100 * COUNTED_LIMIT <= size_of(many, 1 << 30) <= 140 * COUNTED_LIMIT
    odd = ChatPrompt(messages=many.messages, template_kwargs={"number": 2**70, "text": "\ud800"})
    assert size_of(odd, 1 << 30) >= 100 * COUNTED_LIMIT


def test_the_jobs_of_a_process(tokenizer):
    ids = tokenizer.encode("the sea")
    assert result_of(tokenizer, EncodeText(1, "the sea", True)) == TokenIds(1, ids)
    assert result_of(tokenizer, DecodeIds(2, ids, False)) == Text(2, "the sea")
    short = ChatPrompt(messages=[{"role": "user", "content": "x"}])
    rendered = tokenizer.encode(tokenizer.render(short), add_special_tokens=False)
    assert result_of(tokenizer, EncodeChat(3, short, False)) == TokenIds(3, rendered)
    broken = result_of(None, EncodeText(4, "x", True))
    assert isinstance(broken, TextRefused)
    assert (broken.job_id, broken.status) == (4, 500)


def test_clients_are_served_through_a_process_that_ends_with_the_frontend(run_frontend):
    frontend = run_frontend()
    with Client(frontend.endpoint, timeout_s=60) as client:
        ids = client.tokenize(LONG)
        assert client.detokenize(ids) == LONG
        [process] = frontend.frontend._engine._texts._pool._processes.values()
        pid = process.child.pid
    frontend.stop()
    wait_for_exit(pid, "text-0")
