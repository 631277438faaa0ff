"""A pool of text processes: started as they are needed, given jobs, ended when they hang.

`text_work.TextWork` owns the one `TextPool` and decides which texts go there. What runs in the processes is in
`text_process`, the messages are in `text_messages`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import zmq

from common.config import EngineConfig
from common.errors import StartupError, WireError
from common.processes import Child, DeathPipe
from common.sockets import bind_pull, connect_push, new_context
from common.wire import INT32_MAX
from frontend.text_messages import (
    ForTextProcess,
    TextReady,
    TextRefused,
    TextResult,
    decode_from_text_process,
    job_id_of,
)
from frontend.zmq_reader import ZmqReader

FAILURES_LIMIT = 3
"""Text processes that may end unexpectedly before threads take over for good."""
START_PATIENCE_S = 60.0
PATIENCE_S = 10.0
SLOWEST_PER_S = 50_000
"""A text process hangs if a job takes it longer than PATIENCE_S plus a second for each so many characters."""
CHECK_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


class ProcessEnded(Exception):
    """A text process has ended before it had done its job."""


class ProcessHung(Exception):
    """A text process was ended because it hung; another one may do the job.

    Args:
        at_this_job: it hung on this job, and not on one before it in its queue.
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
        jobs: load and future of its open jobs, by job number, in the order in which it does them.
        heard_at_s: when it last sent a message, or got a job while it had none; monotonic.
    """

    def __init__(self, number: int, child: Child, socket: "zmq.Socket[bytes]") -> None:
        self.number = number
        self.child = child
        self.socket = socket
        self.ready = False
        self.jobs: dict[int, tuple[int, asyncio.Future[Any]]] = {}
        self.heard_at_s = time.monotonic()

    @property
    def is_hung(self) -> bool:
        """Whether one job has taken longer than on any reasonable machine."""
        if not self.jobs:
            return False
        load = next(iter(self.jobs.values()))[0]
        limit_s = PATIENCE_S + load / SLOWEST_PER_S if self.ready else START_PATIENCE_S
        return time.monotonic() - self.heard_at_s > limit_s

    @property
    def load(self) -> int:
        """Characters that it still has to work on."""
        return sum(load for load, _ in self.jobs.values())


class TextPool:
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
        self._next_check: asyncio.TimerHandle | None = None

    def submit(self, load: int, job: Callable[[int], ForTextProcess]) -> Awaitable[Any] | None:
        """Hand a job to the process with the least to do; None if there is none, or the job does not fit a message.

        Args:
            load: the job's, as so many characters of text.

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
        self._check_later()
        process.jobs[self._next_job_id] = (load, future)
        # No high-water mark: it never waits, and may come before the process. Long frames are not copied.
        process.socket.send_multipart(frames, zmq.NOBLOCK, copy=all(len(f) <= zmq.COPY_THRESHOLD for f in frames))
        return future

    def close(self) -> None:
        """End all processes."""
        if self._next_check is not None:
            self._next_check.cancel()
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
        number = min(set(range(len(self._processes) + 1)) - self._processes.keys())
        try:
            context = self._context or self._open()
            child = Child(f"text-{number}", self._command(number), self._death_pipe)
        except StartupError as error:
            self._failure_count += 1
            logger.error("%s; threads do its work", error)
            return
        process = TextProcess(number, child, connect_push(context, self._endpoint(f"text-{number}")))
        self._processes[number] = process
        if child.exit_fd >= 0:
            asyncio.get_running_loop().add_reader(child.exit_fd, self._on_end, process)

    def _open(self) -> "zmq.Context[zmq.Socket[bytes]]":
        context = new_context()
        try:
            self._results = bind_pull(context, self._endpoint("texts"))
            self._death_pipe = DeathPipe()
        except (OSError, zmq.ZMQError, StartupError) as error:
            context.destroy(linger=0)
            raise StartupError(f"no text process can be started: {error}") from None
        self._reader = ZmqReader(self._results, self._on_result)
        self._context = context
        return context

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
        except WireError as error:
            logger.error("a text process answers what cannot be read: %s", error)
            self._on_unreadable(frames[0], error)
            return
        if isinstance(message, TextReady):
            if message.number in self._processes:
                self._processes[message.number].ready = True
                self._processes[message.number].heard_at_s = time.monotonic()
            return
        self._end_job(message)

    def _on_unreadable(self, data: bytes, error: WireError) -> None:
        """Refuse the job whose answer cannot be read.

        If not even its number can be, all processes end, and threads do their jobs: one of these would wait for ever,
        and nothing says which, as all answers come on one socket.
        """
        try:
            job_id = job_id_of(data)
        except WireError:
            for process in list(self._processes.values()):
                self._failure_count += 1
                self._forget(process)
        else:
            self._end_job(TextRefused(job_id, f"internal error: {error}", "internal_error", None, 500))

    def _end_job(self, answer: TextResult) -> None:
        for process in self._processes.values():
            if answer.job_id in process.jobs:
                process.heard_at_s = time.monotonic()
                _, future = process.jobs.pop(answer.job_id)
                _settle(future, answer.value)

    def _on_end(self, process: TextProcess) -> None:
        self._failure_count += 1
        self._forget(process)
        logger.error("%s", process.child.describe_end())

    def _check_later(self) -> None:
        if self._next_check is None:
            self._next_check = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._end_hung)

    def _end_hung(self) -> None:
        """End hung processes: nothing else would tell those who wait for their jobs."""
        self._next_check = None
        for process in [process for process in self._processes.values() if process.is_hung]:
            logger.error("text-%d does not respond; another one does its work", process.number)
            for place, (_, future) in enumerate(process.jobs.values()):
                if not future.done():
                    future.set_exception(ProcessHung(at_this_job=place == 0))
            self._forget(process)
        if any(process.jobs for process in self._processes.values()):
            self._check_later()

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
    except Exception as error:  # a result that cannot be had concerns whoever waits for it, and nobody else would tell
        future.set_exception(error)
