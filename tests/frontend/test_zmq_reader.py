"""Reading a ZeroMQ socket through its descriptor: nothing waits unread."""

import asyncio

import zmq

from frontend.zmq_reader import SLICE_LIMIT, ZmqReader


def test_messages_after_one_that_could_not_be_handled_are_read(tmp_path):
    names = [b"%d" % number for number in range(3 * SLICE_LIMIT)]
    bad = {names[0], names[SLICE_LIMIT + 5], names[-2]}
    read, failures, slices = [], [], []

    async def main() -> None:
        done = asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

        def handle(frames: list[bytes]) -> None:
            read.append(frames[0])
            if frames[0] == names[-1]:
                done.set()
            if frames[0] in bad:
                raise ValueError(frames[0])

        with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
            pull.bind(f"ipc://{tmp_path}/s")
            push.connect(f"ipc://{tmp_path}/s")
            for name in names:
                push.send(name)
            reader = ZmqReader(pull, handle, lambda: slices.append(len(read)))
            await asyncio.wait_for(done.wait(), 20)
            reader.close()

    asyncio.run(main())
    assert read == names
    assert {error.args[0] for error in failures} == bad
    assert slices, "what comes after a run of messages is done in any case"


def test_messages_of_one_frame_come_as_bytes(tmp_path):
    read: list[bytes] = []

    async def main() -> None:
        done = asyncio.Event()

        def handle(data: bytes) -> None:
            read.append(data)
            if len(read) == 2 * SLICE_LIMIT:
                done.set()

        with zmq.Context() as context, context.socket(zmq.PULL) as pull, context.socket(zmq.PUSH) as push:
            pull.bind(f"ipc://{tmp_path}/s")
            push.connect(f"ipc://{tmp_path}/s")
            reader = ZmqReader(pull, handle, one_frame=True)
            for number in range(2 * SLICE_LIMIT):
                push.send(b"%d" % number)
            await asyncio.wait_for(done.wait(), 20)
            reader.close()

    asyncio.run(main())
    assert read == [b"%d" % number for number in range(2 * SLICE_LIMIT)]
