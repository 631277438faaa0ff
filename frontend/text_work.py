"""Encodes, renders and decodes text where nobody has to wait for it: inline, in a thread, or in a process of its own.

The tokenizer library lets other threads run only part of the time while it encodes, and not at all while it decodes:
100,000 tokens done in a thread hold up every stream for tens of milliseconds. So long texts go to text processes
(`--frontend-workers`), which are started when the first long text comes. Threads do the texts of medium length, and the
long ones where there are no text processes.

`engine.Engine` owns one `TextWork`; it belongs to the event loop that it is used in.
"""

import asyncio
import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.config import EngineConfig
from common.errors import RequestError
from common.wire import INT32_MAX, array_bytes
from frontend.large_json import LargeBody, parse_large
from frontend.prompt import ChatPrompt, size_of
from frontend.text_messages import DecodeIds, EncodeChat, EncodeText, ForTextProcess, ParseJson
from frontend.text_pool import ProcessEnded, ProcessHung, TextPool
from frontend.tokenizer import Tokenizer

INLINE_LIMIT = 512
"""Texts up to this many characters are encoded inline, which takes less time than handing them to a thread."""
THREAD_LIMIT = 16_384
"""Characters (or token ids) that a thread handles in a few milliseconds; longer texts go to a text process."""
PENDING_LIMIT = 1 << 28
"""Characters that may be waiting or worked on; more are refused."""
THREAD_COUNT = 2
BYTES_PER_CHARACTER = 32
"""Of JSON, which a process parses in no more time than it may take to encode a character: a hung one is noticed."""
TRIES = 2
"""Text processes that may hang on one job; if the second one does too, it is the text's fault, and it is refused."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class TextWork:
    """Encodes, renders and decodes text, and parses JSON: inline, in threads or in text processes.

    Args:
        config: names the number of processes, the run directory and the tokenizer's folder.
        tokenizer: the model's.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = started_threads(THREAD_COUNT, "tokenizer")
        self._pool = TextPool(config) if config.run_dir and config.server.frontend_workers else None
        self._pending = 0
        self._closed = False

    def encode_now(self, text: str, *, add_special_tokens: bool) -> "array[int] | None":
        """Token ids of a short text; None for one that takes longer."""
        if len(text) > INLINE_LIMIT:
            return None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Token ids of a text.

        Raises:
            RequestError: too much waits already.
        """
        ids = self.encode_now(text, add_special_tokens=add_special_tokens)
        if ids is not None:
            return ids
        return await self._run(
            len(text),
            lambda job_id: EncodeText(job_id, text, add_special_tokens),
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens),
        )

    async def encode_chat(self, chat: ChatPrompt, *, add_special_tokens: bool) -> "array[int]":
        """Token ids of a chat, rendered with the model's template.

        Raises:
            RequestError: no template, it refuses the chat, or too much waits already.
        """
        return await self._run(
            size_of(chat, PENDING_LIMIT),
            lambda job_id: EncodeChat(job_id, chat, add_special_tokens),
            lambda: self._tokenizer.encode(self._tokenizer.render(chat), add_special_tokens=add_special_tokens),
        )

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids.

        Raises:
            RequestError: an id that int32 cannot hold or below 0, or too much waits already.
        """
        ids = _int32_ids(token_ids)
        return await self._run(
            len(ids),
            lambda job_id: DecodeIds(job_id, ids, skip_special_tokens),
            lambda: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens),
        )

    async def parse(self, body: bytes, id_fields: tuple[str, ...]) -> LargeBody:
        """The values of a large JSON body, see `large_json.parse_large`.

        Raises:
            RequestError: no JSON object, too many values in it, or too much waits already.
        """
        return await self._run(
            len(body),
            lambda job_id: ParseJson(job_id, body, id_fields),
            lambda: parse_large(body, id_fields),
            load=len(body) // BYTES_PER_CHARACTER,
        )

    def close(self) -> None:
        """End threads and processes; requests that still wait get an error. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    async def _run(
        self, size: int, job: Callable[[int], ForTextProcess], work: Callable[[], T], load: int | None = None
    ) -> T:
        """Have a process do `job`, or a thread do `work`, which is the same; `size` in characters.

        Args:
            load: how many characters take as long to encode; by default as many.
        """
        if self._pending + size > PENDING_LIMIT:
            text = "too much text is waiting to be encoded; try again in a moment"
            raise RequestError(text, code="too_many", status=429, retry_after_ms=1000)
        self._pending += size
        try:
            return await self._done_somewhere(size, job, work, size if load is None else load)
        except (ProcessEnded, asyncio.CancelledError):
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise RequestError("the engine has shut down", code="shutting_down", status=503) from None
        finally:
            self._pending -= size

    async def _done_somewhere(
        self, size: int, job: Callable[[int], ForTextProcess], work: Callable[[], T], load: int
    ) -> T:
        tries = 0
        while size > THREAD_LIMIT and self._pool is not None and (waiting := self._pool.submit(load, job)):
            try:
                result: T = await waiting
                return result
            except ProcessHung as hung:
                if self._closed:
                    raise ProcessEnded from None
                tries += hung.at_this_job
                if tries == TRIES:
                    text = f"a text of {size} characters takes too long to work on"
                    raise RequestError(text, code="text_too_slow", status=503) from None
            except ProcessEnded:
                if self._closed:
                    raise
                logger.warning("a text process has ended; its work is done in a thread")
                break
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def started_threads(count: int, name: str) -> ThreadPoolExecutor:
    """A thread pool whose threads already run.

    Starting a thread later could block the event loop for good: Python waits for the new thread's first step, which
    never comes if there is no memory for it.
    """
    threads = ThreadPoolExecutor(count, thread_name_prefix=name)
    all_run = threading.Barrier(count + 1)
    for _ in range(count):
        threads.submit(all_run.wait)
    all_run.wait()
    return threads


def _int32_ids(token_ids: Sequence[int]) -> "array[int]":
    try:
        ids = token_ids if isinstance(token_ids, array) and token_ids.typecode == "i" else array("i", token_ids)
    except (OverflowError, TypeError):
        ids = array("i", [-1])
    if not array_bytes(ids)[3::4].isascii():  # the sign bit is in every fourth byte; `min` takes milliseconds
        raise RequestError(f"token ids are numbers from 0 to {INT32_MAX}", param="token_ids")
    return ids
