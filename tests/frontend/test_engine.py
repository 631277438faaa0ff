"""The asyncio side of the engine: prompts of all kinds, streams, slow readers."""

import asyncio

import pytest

from common.errors import ConfigError, RequestError
from common.sampling_params import SamplingParams
from frontend.engine import Engine
from frontend.events import Delta, Final
from frontend.prompt import ChatPrompt


def run(main):
    return asyncio.run(asyncio.wait_for(main(), 30))


def test_a_slow_reader_finds_one_merged_delta(memory_engine):
    async def main():
        stream = await memory_engine.engine.generate("the sea", SamplingParams(max_tokens=9))
        for _ in range(5):
            memory_engine.tokens(0, memory_engine.engine.tokenizer.encode("a"))
        memory_engine.tokens(0, memory_engine.engine.tokenizer.encode("a"), finish="length")
        return [event async for event in stream]

    delta, final = run(main)
    assert isinstance(delta, Delta)
    assert (delta.text, delta.finish_reason, len(delta.token_ids)) == ("aaaaaa", "length", 6)
    assert isinstance(final, Final)


def test_a_reader_that_waits_is_woken(memory_engine):
    async def main():
        stream = await memory_engine.engine.generate([5, 6], SamplingParams(max_tokens=9))
        reading = asyncio.ensure_future(stream.final())
        await asyncio.sleep(0)
        memory_engine.tokens(0, [40], finish="length")
        return await reading

    assert run(main).usage.completion_tokens == 1


@pytest.mark.parametrize("count", [1, 2], ids=["tokens", "deltas"])
def test_no_text_overtakes_what_waits_for_the_reader(memory_engine, count):
    """The direct way is open while the reader waits for more, and closed from the first text that it does not take."""
    encode, taken = memory_engine.engine.tokenizer.encode, []

    class Shortcut:
        def take(self, text: str) -> bool:
            if "c" not in text:
                taken.append(text)
            return "c" not in text

    async def main():
        stream = await memory_engine.engine.generate([5, 6], SamplingParams(max_tokens=9))
        stream.shortcuts = [Shortcut()]
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for letter in "abcd":
            memory_engine.tokens(0, [*encode(letter)] * count)
        return await reading

    assert run(main).text == "c" * count + "d" * count
    assert taken == ["a" * count, "b" * count]


def test_leaving_a_stream_aborts_the_request(memory_engine):
    async def main():
        async with await memory_engine.engine.generate([5, 6], SamplingParams()):
            pass

    run(main)
    assert list(memory_engine.sent[1].request_ids) == [0]
    assert memory_engine.core.live_count == 0


def test_a_cancelled_reader_aborts_the_request(memory_engine):
    async def main():
        stream = await memory_engine.engine.generate([5, 6], SamplingParams())
        reading = asyncio.ensure_future(stream.final())
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])

    run(main)
    assert memory_engine.core.live_count == 0


def test_a_failure_is_raised_from_the_stream(memory_engine):
    async def main():
        stream = await memory_engine.engine.generate([5, 6], SamplingParams())
        memory_engine.core.fail_all("worker-0 failed")
        await stream.final()

    with pytest.raises(RequestError, match="worker-0 failed"):
        run(main)


def test_prompts_of_all_kinds(memory_engine):
    tokenizer = memory_engine.engine.tokenizer
    chat = ChatPrompt(messages=[{"role": "user", "content": "hello"}])

    async def main():
        long_text = "the open sea " * 100
        assert await memory_engine.engine.prompt_ids(long_text) == tokenizer.encode(long_text)
        assert list(await memory_engine.engine.prompt_ids((5, 6))) == [5, 6]
        text = tokenizer.decode(await memory_engine.engine.prompt_ids(chat), skip_special_tokens=False)
        assert text == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
        for bad in ([1.5], [None], [2**31], ["a"]):
            with pytest.raises(RequestError):
                await memory_engine.engine.prompt_ids(bad)

    run(main)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), 1e9])
def test_bad_timeouts_are_refused(memory_engine, timeout_s):
    async def main():
        await memory_engine.engine.generate([5, 6], SamplingParams(), timeout_s=timeout_s)

    with pytest.raises(RequestError, match="timeout"):
        run(main)
    assert memory_engine.sent == []


def test_parameters_come_from_the_client_then_the_model_then_the_api(memory_engine, byte_tokenizer):
    memory_engine.engine._defaults = {"temperature": 0.6, "top_k": 20}
    params = memory_engine.engine.make_params({"top_k": 5}, max_tokens=None, temperature=1.0)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, None)
    assert memory_engine.engine.make_params({}, model_defaults=False).temperature == 1.0


def test_unusable_model_defaults_stop_the_start(memory_engine, byte_tokenizer, monkeypatch):
    monkeypatch.setattr(byte_tokenizer, "sampling_defaults", {"temperature": "hot"})
    with pytest.raises(ConfigError, match=r"generation_config\.json.*temperature"):
        Engine(memory_engine.engine.config, byte_tokenizer, lambda data: None)
