"""What the sockets make of bytes that cannot be read; the sockets themselves: test_process.py."""

import pytest
import zmq

from common.errors import WireError
from common.messages import AbortRequests, AddRequest, RequestFailed, decode_for_frontend, decode_for_scheduler
from common.wire import pack
from scheduler_proc.simulation import simple_request
from scheduler_proc.transport import SocketTransport, read_result, refusal_of


def test_a_request_that_only_tells_its_number_is_refused_by_it():
    refusal = refusal_of(pack([AddRequest.CODE, 7, "no token ids"]), WireError("x" * 9000))
    assert decode_for_frontend(refusal.to_wire()) == refusal
    assert isinstance(refusal, RequestFailed)
    assert (refusal.request_id, refusal.error_code, refusal.status) == (7, "internal_error", 500)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack([AddRequest.CODE]),
        pack([AddRequest.CODE, -1]),
        pack([AddRequest.CODE, 2**31]),
        pack([AddRequest.CODE, True]),
        pack([AddRequest.CODE, "7"]),
        pack([AbortRequests.CODE, 7]),
        pack([200, 7]),
    ],
    ids=repr,
)
def test_what_tells_no_number_is_not_answered(data):
    assert refusal_of(data, WireError("unreadable")) is None


class Inbox:
    """A socket with messages."""

    def __init__(self, *messages: bytes) -> None:
        self.messages = list(messages)

    def receive(self, _: int) -> bytes:
        if not self.messages:
            raise zmq.Again
        return self.messages.pop(0)

    def get(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN if self.messages else 0


def test_a_request_that_finds_no_memory_is_refused_alone(monkeypatch):
    transport = object.__new__(SocketTransport)
    sent = []
    transport._requests = Inbox(*(simple_request(i, range(3), max_tokens=1).to_wire() for i in (5, 6)))
    transport._readable = {transport._requests}
    transport._receive_request = transport._requests.receive
    transport._send_out = lambda data: sent.append(decode_for_frontend(data))
    failing = [True]

    def decode(data: bytes):
        if failing and failing.pop():
            raise MemoryError
        return decode_for_scheduler(data)

    monkeypatch.setattr("scheduler_proc.transport.decode_for_scheduler", decode)
    assert [message.request_id for message in transport.requests(9)] == [6]
    assert [(message.request_id, message.status) for message in sent] == [(5, 500)]
    assert "there is no memory for it" in sent[0].message


def test_a_result_that_cannot_be_read_is_an_error_that_names_its_sender():
    with pytest.raises(WireError, match="a message of the worker cannot be read: type code 200"):
        read_result(pack([200]))
