"""Scheduler and worker poll busily as long as the option says, and see their orders while they do.

The clock of these polls stands still: they would go on for ever.
"""

from array import array

import pytest

from common.busy_poll import BusyPoll
from common.child import SupervisorLink
from common.config import EngineConfig, ServerOptions
from common.messages import AbortRequests, FlushCache, Stop
from common.sockets import bind_router, connect_push, new_context
from scheduler_proc.transport import SocketTransport
from worker_proc.reporter import InlineReporter
from worker_proc.worker import Worker


def for_ever(made: BusyPoll) -> BusyPoll:
    """The same, but that after a message nothing except another one ends it."""
    assert made.limit_s == 0.007
    busy = BusyPoll(0.007, clock=lambda: 0.0)
    busy.errands = made.errands
    return busy


@pytest.fixture(params=["never", "always"], ids=["", "with ZeroMQ's thread"])
def config(tmp_path, request) -> EngineConfig:
    return EngineConfig(server=ServerOptions(busy_poll_ms=7, busy_poll_io=request.param), run_dir=str(tmp_path))


@pytest.fixture
def link(config):
    with new_context() as context, bind_router(context, config.endpoint("supervisor")):  # hears the last words
        link = SupervisorLink("test", config.endpoint("supervisor"))
        yield link
        link.close()


def test_the_scheduler_sees_orders_and_messages(config, link):
    transport = SocketTransport(config, link)
    transport._busy = for_ever(transport._busy)
    with new_context() as context, connect_push(context, config.endpoint("requests")) as frontend:
        for message in (FlushCache(), AbortRequests(array("i", [3]))):
            frontend.send(message.to_wire())
            assert not transport.wait(None)
            assert [type(each) for each in transport.requests(1)] == [type(message)]
        link.order(Stop(5))
        assert transport.wait(None)
        assert transport.orders() == [Stop(5)]
        assert not transport.wait(0)
    transport.close()


def test_the_worker_sees_orders(config, link):
    worker = Worker(config, link, 0)
    worker._busy = for_ever(worker._busy)
    link.wake()
    link.order(Stop(5))
    assert worker._next_plan(None, InlineReporter(pytest.fail)) is None
    worker._busy.close()
    worker._plans.close()
    worker._results.close()
    worker._context.term()
