"""Text to token ids and back, done where nobody waits for it: on the spot, in a thread, or in a process of its own.

The library that encodes lets other threads run for part of the time only, and one that decodes not at all: 100,000
tokens done in a thread hold every stream up for tens of milliseconds. So what is long goes to text processes
(`--frontend-workers`), which start when the first long text comes; where there are none, and for what is of middling
length, there are threads.

`engine.Engine` owns one `TextWork`; it belongs to the event loop that it is used in.
"""

import asyncio
import logging
import threading
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import zmq

from common.config import EngineConfig
from common.errors import RequestError, StartupError, WireError
from common.processes import Child, DeathPipe
from common.sockets import bind_pull, connect_push, new_context
from common.wire import INT32_MAX, array_bytes
from frontend.large_json import LargeBody, parse_large
from frontend.prompt import ChatPrompt, size_of
from frontend.text_messages import (
    DecodeIds,
    EncodeChat,
    EncodeText,
    ForTextProcess,
    ParseJson,
    TextReady,
    decode_from_text_process,
)
from frontend.tokenizer import Tokenizer
from frontend.zmq_reader import ZmqReader

INLINE_LIMIT = 512
"""Texts up to this many characters are encoded on the spot: that takes less time than a thread's hand-over."""
THREAD_LIMIT = 16_384
"""Characters (or token ids) that a thread works on in a few milliseconds; more go to a text process."""
PENDING_LIMIT = 1 << 28
"""Characters that may wait or be worked on; what comes on top is refused."""
THREAD_COUNT = 2
FAILURES_LIMIT = 3
"""Text processes that may end unexpectedly before threads take over for good."""
START_PATIENCE_S = 60.0
PATIENCE_S = 10.0
SLOWEST_PER_S = 50_000
"""A text process that takes longer over one job than PATIENCE_S, and a second for so many characters, stands still."""
TRIES = 2
"""Text processes that may stand still over one job: it is not the text's fault, or it is."""
LOOK_INTERVAL_S = 1.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


class TextWork:
    """Encodes, renders, decodes, and parses.

    Args:
        config: names the number of processes, the run directory and the tokenizer's folder.
        tokenizer: the model's.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = started_threads(THREAD_COUNT, "tokenizer")
        self._processes = TextProcesses(config) if config.run_dir and config.server.frontend_workers else None
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
            len(body), lambda job_id: ParseJson(job_id, body, id_fields), lambda: parse_large(body, id_fields)
        )

    def close(self) -> None:
        """End threads and processes; whoever still waits gets an error. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    async def _run(self, size: int, job: Callable[[int], ForTextProcess], work: Callable[[], T]) -> T:
        """Have a process do a job of so many characters, or a thread do the same work."""
        if self._pending + size > PENDING_LIMIT:
            text = "too much text is waiting to be encoded; try again in a moment"
            raise RequestError(text, code="too_many", status=429, retry_after_ms=1000)
        self._pending += size
        try:
            return await self._done_somewhere(size, job, work)
        except (ProcessEnded, asyncio.CancelledError):
            task = asyncio.current_task()
            if not self._closed or (task is not None and task.cancelling()):
                raise
            raise RequestError("the engine has shut down", code="shutting_down", status=503) from None
        finally:
            self._pending -= size

    async def _done_somewhere(self, size: int, job: Callable[[int], ForTextProcess], work: Callable[[], T]) -> T:
        tries = 0
        while size > THREAD_LIMIT and self._processes is not None and (waiting := self._processes.submit(size, job)):
            try:
                result: T = await waiting
                return result
            except ProcessSilent as silent:
                if self._closed:
                    raise ProcessEnded from None
                tries += silent.at_this_job
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
    """A pool whose threads run already. Python starts one by waiting for its first step, which without memory it never
    takes: the loop would stand still."""
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


class ProcessEnded(Exception):
    """A text process has ended before it had done its job."""


class ProcessSilent(Exception):
    """A text process was ended because it stood still; another one may do the job.

    Args:
        at_this_job: it stood still over this one, and not over one before it.
    """

    def __init__(self, at_this_job: bool) -> None:
        super().__init__()
        self.at_this_job = at_this_job


class TextProcess:
    """One text process as the frontend sees it.

    Args:
        number: from 0.
        child: the process.
        socket: takes its jobs.

    Attributes:
        ready: it has loaded its tokenizer.
        jobs: size and future of what it has not done yet, by job number, in the order in which it does them.
        heard_at_s: when it last said something, or began to have jobs; monotonic.
    """

    def __init__(self, number: int, child: Child, socket: "zmq.Socket[bytes]") -> None:
        self.number = number
        self.child = child
        self.socket = socket
        self.ready = False
        self.jobs: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        self.heard_at_s = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether it has been at one job for longer than that takes anywhere."""
        if not self.jobs:
            return False
        size = next(iter(self.jobs.values()))[0]
        limit_s = PATIENCE_S + size / SLOWEST_PER_S if self.ready else START_PATIENCE_S
        return time.monotonic() - self.heard_at_s > limit_s

    @property
    def load(self) -> int:
        """Characters that it still has to work on."""
        return sum(size for size, _ in self.jobs.values())


class TextProcesses:
    """Text processes, started as they are needed.

    Args:
        config: names their number, the run directory and the tokenizer's folder.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._processes: dict[int, TextProcess] = {}
        self._next_job_id = 0
        self._failure_count = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._next_look: asyncio.TimerHandle | None = None

    def submit(self, size: int, job: Callable[[int], ForTextProcess]) -> Awaitable[Any] | None:
        """Hand a job to the process with the least to do; None if there is none, or the job does not fit a message.

        The result raises what the job does (RequestError), or ProcessEnded.
        """
        if all(process.jobs for process in self._processes.values()):
            self._start_one_more()
        if not self._processes:
            return None
        process = min(self._processes.values(), key=lambda process: process.load)
        self._next_job_id = (self._next_job_id + 1) & INT32_MAX
        try:
            frames = job(self._next_job_id).to_frames()
        except (TypeError, ValueError, OverflowError, RecursionError):
            return None
        future = asyncio.get_running_loop().create_future()
        if not process.jobs:
            process.heard_at_s = time.monotonic()
        self._look_later()
        process.jobs[self._next_job_id] = (size, future)
        # No high-water mark: it never waits, and may come before the process. Long frames are not copied.
        process.socket.send_multipart(frames, zmq.NOBLOCK, copy=all(len(f) <= zmq.COPY_THRESHOLD for f in frames))
        return future

    def close(self) -> None:
        """End all processes."""
        if self._next_look is not None:
            self._next_look.cancel()
        for process in list(self._processes.values()):
            self._forget(process)
        if self._context is not None:
            self._reader.close()
            self._results.close(linger=0)
            self._death_pipe.close()
            self._context.term()

    def _start_one_more(self) -> None:
        starting = any(not process.ready for process in self._processes.values())
        wanted = len(self._processes) < self._config.server.frontend_workers
        if starting or not wanted or self._failure_count >= FAILURES_LIMIT:
            return
        if self._context is None:
            self._open()
        assert self._context is not None, "just opened"
        number = min(set(range(len(self._processes) + 1)) - self._processes.keys())
        try:
            child = Child(f"text-{number}", self._command(number), self._death_pipe)
        except StartupError as error:
            self._failure_count += 1
            logger.error("%s; threads do its work", error)
            return
        process = TextProcess(number, child, connect_push(self._context, self._endpoint(f"text-{number}")))
        self._processes[number] = process
        if child.exit_fd >= 0:
            asyncio.get_running_loop().add_reader(child.exit_fd, self._on_end, process)

    def _open(self) -> None:
        self._context = new_context()
        self._death_pipe = DeathPipe()
        self._results = bind_pull(self._context, self._endpoint("texts"))
        self._reader = ZmqReader(self._results, self._on_result)

    def _command(self, number: int) -> list[str]:
        config = self._config
        command = ["-m", "frontend.text_process", "--number", str(number)]
        command += ["--jobs", self._endpoint(f"text-{number}"), "--results", self._endpoint("texts")]
        command += ["--tokenizer", config.tokenizer_dir or config.model_dir]
        command += ["--chat-template", config.model.chat_template]
        return [*command, "--log-level", config.log.log_level, "--log-format", config.log.log_format]

    def _endpoint(self, name: str) -> str:
        return f"ipc://{Path(self._config.run_dir) / name}.sock"

    def _on_result(self, frames: list[bytes]) -> None:
        try:
            message = decode_from_text_process(frames[0])
        except WireError as error:  # whoever waits for it would do so for ever: threads do what is under way
            logger.error("a text process answers what cannot be read: %s", error)
            for process in list(self._processes.values()):
                self._failure_count += 1
                self._forget(process)
            return
        if isinstance(message, TextReady):
            if message.number in self._processes:
                self._processes[message.number].ready = True
                self._processes[message.number].heard_at_s = time.monotonic()
            return
        for process in self._processes.values():
            if message.job_id in process.jobs:
                process.heard_at_s = time.monotonic()
                _, future = process.jobs.pop(message.job_id)
                _settle(future, message.value)

    def _on_end(self, process: TextProcess) -> None:
        self._failure_count += 1
        self._forget(process)
        logger.error("%s", process.child.describe_end())

    def _look_later(self) -> None:
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_INTERVAL_S, self._look_for_silence)

    def _look_for_silence(self) -> None:
        """End what stands still: nothing else would tell whoever waits for it."""
        self._next_look = None
        for process in [process for process in self._processes.values() if process.is_silent]:
            logger.error("text-%d does not respond; another one does its work", process.number)
            for place, (_, future) in enumerate(process.jobs.values()):
                if not future.done():
                    future.set_exception(ProcessSilent(at_this_job=place == 0))
            self._forget(process)
        if any(process.jobs for process in self._processes.values()):
            self._look_later()

    def _forget(self, process: TextProcess) -> None:
        """End a process; what it has not done is for a thread to do."""
        if process.child.exit_fd >= 0:
            asyncio.get_running_loop().remove_reader(process.child.exit_fd)
        del self._processes[process.number]
        process.child.kill()
        process.child.close()
        process.socket.close(linger=0)
        for _, future in process.jobs.values():
            if not future.done():
                future.set_exception(ProcessEnded())


def _settle(future: "asyncio.Future[Any]", value: Callable[[], Any]) -> None:
    if future.done():  # whoever wanted it has gone
        return
    try:
        future.set_result(value())
    except RequestError as error:
        future.set_exception(error)
