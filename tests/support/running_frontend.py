"""A whole frontend in a thread of the test, between a scripted scheduler and the test's orders as its supervisor.

It can be lost and started again, as with `--restart`: without a word to its clients, and without what it knew.
"""

import asyncio
import os
import queue
import threading

from benchmarks.fake_scheduler import FakeScheduler
from common import messages as m
from common.config import EngineConfig, SchedulerOptions, ServerOptions
from frontend.main import Frontend
from tests.support import tiny


class FakeLink:
    """A supervisor link that the test gives orders through."""

    def __init__(self) -> None:
        self.wake_fd, self._write_fd = os.pipe()
        os.set_blocking(self.wake_fd, False)
        self.progress = 0
        self.is_ready = threading.Event()
        self.detail = ""
        self._orders: queue.SimpleQueue = queue.SimpleQueue()

    def ready(self, detail: str) -> None:
        self.detail = detail
        self.is_ready.set()

    def failed(self, message: str) -> None:
        self.detail = message

    def set_state(self, state: str) -> None:
        self.state = state

    def profile(self, order: m.Profile) -> None:
        self.order(order)

    def order(self, order) -> None:
        self._orders.put(order)
        os.write(self._write_fd, b"x")

    def take_orders(self) -> list:
        os.read(self.wake_fd, 4096)
        orders = []
        while not self._orders.empty():
            orders.append(self._orders.get())
        return orders

    def close(self) -> None:
        os.close(self.wake_fd)
        os.close(self._write_fd)


class RunningFrontend(threading.Thread):
    """The real frontend in a thread: its own sockets and event loop, a scripted scheduler, orders by hand.

    Args:
        folder: an empty one, or that of a frontend which was lost.
        server: server options that differ from the usual.
        session: how often processes of this engine have been lost.
        is_known: whether there is a scheduler from the start.
        queue_limit: how many requests may wait.
        max_num_seqs: how many may run.
        script: what the scheduler does.
    """

    def __init__(
        self, folder, server=None, session=0, *, is_known=True, queue_limit=4096, max_num_seqs=0, **script
    ) -> None:
        super().__init__(name="frontend", daemon=True)
        self.folder, self._server, self._script = folder, server or {}, script
        model_dir = folder / "model"
        if not model_dir.exists():
            model_dir.mkdir()
            tiny.save_tokenizer(model_dir)
        options = ServerOptions(**{"http": False, "client_endpoint": f"ipc://{folder}/client.sock", **self._server})
        self.config = EngineConfig(
            server=options, run_dir=str(folder),
            scheduler=SchedulerOptions(max_num_queued_reqs=queue_limit, max_num_seqs=max_num_seqs),
            model_dir=str(model_dir), session=session,
        )  # fmt: skip
        self.endpoint = options.client_endpoint
        self.link = FakeLink()
        self.exit_code: int | None = None
        self.scheduler: FakeScheduler | None = None
        self._is_closed = False
        self.start()
        if is_known:
            self.start_scheduler()

    def start_scheduler(self) -> None:
        """Start what the frontend waits for; returns when it serves."""
        self.scheduler = FakeScheduler(self.config, **self._script)
        assert self.link.is_ready.wait(30), "the frontend did not get ready"

    def lose(self) -> None:
        """End it as a crash would: its clients hear nothing."""
        if self.is_alive():
            self.frontend._ended.get_loop().call_soon_threadsafe(self.frontend._clients.fall_silent)
        self.close()

    def again(self, **options) -> "RunningFrontend":
        """Its successor, once it is lost."""
        return RunningFrontend(self.folder, self._server, self.config.session + 1, **{**self._script, **options})

    def run(self) -> None:
        async def main() -> int:
            self.frontend = Frontend(self.config, self.link)
            return await self.frontend.run()

        self.exit_code = asyncio.run(main())

    def stop(self, grace_ms: int = 0) -> int | None:
        """Order the stop and wait for the end."""
        if self.is_alive():
            self.link.order(m.Stop(grace_ms))
        self.join(30)
        assert not self.is_alive(), "the frontend did not stop"
        return self.exit_code

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.stop()
        if self.scheduler is not None:
            self.scheduler.close()
        self.link.close()
