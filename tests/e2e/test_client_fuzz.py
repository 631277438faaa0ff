"""Messages gone wrong against the real processes: they serve on, lose nothing and take no more memory."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from common.client_messages import decode_to_client
from common.sampling_params import SamplingParams
from frontend import Client
from tests.support.attack import attack
from tests.support.idle import assert_becomes_idle
from tests.support.server import Server

pytestmark = pytest.mark.timeout(180)
GREEDY = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
GROWTH_LIMIT_BYTES = 150 << 20
ATTACKERS, MESSAGES_EACH = 4, 250


def memory_bytes(pid: int, field: str = "VmRSS") -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


@pytest.fixture(scope="module")
def attacked(tiny_model_dir):
    """An engine of its own, since its memory is looked at."""
    with Server(tiny_model_dir, "--dtype", "float32", "--block-size", "4", "--num-kv-blocks", "512") as running:
        yield running


def test_many_attackers_at_once(attacked):
    endpoint, frontend_pid = attacked.ready["client_endpoint"], attacked.children()["frontend"]
    with Client(endpoint, timeout_s=60) as client, ThreadPoolExecutor(ATTACKERS) as pool:
        expected = client.generate("The sea", GREEDY).text
        attack(endpoint, range(50))
        before = memory_bytes(frontend_pid)
        ranges = [range(start * 1000, start * 1000 + MESSAGES_EACH) for start in range(1, ATTACKERS + 1)]
        attacks = [pool.submit(attack, endpoint, seeds) for seeds in ranges]
        assert client.generate("The sea", GREEDY).text == expected
        for running in attacks:
            running.result()
        assert client.generate("The sea", GREEDY).text == expected
        assert_becomes_idle(client)
    assert memory_bytes(frontend_pid) - before < GROWTH_LIMIT_BYTES
    assert "Traceback" not in attacked.stderr()


def test_a_message_of_many_small_things_takes_little_memory(attacked):
    endpoint, frontend_pid = attacked.ready["client_endpoint"], attacked.children()["frontend"]
    before = memory_bytes(frontend_pid, "VmHWM")
    many = b"\x92\x3d\xdd\x03\x00\x00\x00" + b"\x90" * (48 << 20)
    with Client(endpoint, timeout_s=60) as client, zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.set(zmq.LINGER, 0)
        raw.connect(endpoint)
        raw.send(many)
        assert raw.poll(60_000)
        assert decode_to_client(raw.recv()).code == "bad_message"
        assert client.ping() >= 0
    assert memory_bytes(frontend_pid, "VmHWM") - before < 4 * len(many)
