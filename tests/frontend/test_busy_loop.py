"""The frontend and its clients poll busily while they have requests, and see everything else meanwhile."""

import asyncio
import os

import pytest

from common.busy_poll import BusyPoll
from frontend import Client
from frontend.busy_loop import BusyLoop


def for_ever(made: BusyPoll) -> BusyPoll:
    """The same, but that after a message nothing except another one ends it: its clock stands still."""
    busy = BusyPoll(made.limit_s, clock=lambda: 0.0)
    busy.errands = made.errands
    return busy


def test_an_asyncio_loop_sees_everything_and_sleeps_afterwards():
    seen = []

    async def main() -> None:
        loop, clock = asyncio.get_running_loop(), [0.0]
        busy = BusyLoop(BusyPoll(0.007, clock=lambda: clock[0]))
        read_fd, write_fd = os.pipe()
        done = asyncio.Event()
        loop.add_reader(read_fd, lambda: (seen.append(os.read(read_fd, 1)), done.set()))
        busy.note()
        busy.note()
        loop.call_later(0.001, os.write, write_fd, b"x")
        await done.wait()
        clock[0] = 1.0
        while busy._turns:
            await asyncio.sleep(0)
        seen.append(len(loop._ready))
        busy.note()
        assert busy._turns, "the next message starts it again"
        loop.remove_reader(read_fd)
        os.close(read_fd)
        os.close(write_fd)

    asyncio.run(main())
    assert seen == [b"x", 0]


@pytest.mark.parametrize("io", ["never", "always"])
def test_the_frontend_and_its_client_poll_while_they_have_a_request(run_frontend, io):
    running = run_frontend(server={"busy_poll_ms": 7.0, "busy_poll_io": io})
    loop = running.frontend._busy
    assert loop._busy.limit_s == 0.007
    loop._busy = for_ever(loop._busy)
    with Client(running.endpoint, busy_poll_ms=9, busy_poll_io=io) as client:
        assert client._busy.limit_s == 0.009
        client._busy = for_ever(client._busy)
        assert (client._busy.errands is not None) == (loop._busy.errands is not None) == (io == "always")
        client.status()
        assert not loop._turns, "nobody's request"
        assert client.generate("The sea", {"max_tokens": 4}).samples[0].token_ids
        assert loop._turns
    assert running.stop() == 0
