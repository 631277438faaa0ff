"""The policies: who runs first, and that nobody starves."""

from dataclasses import replace

from scheduler_proc.prefix_cache import Chain
from scheduler_proc.queues import AGEING_S, CLIENT_LIMIT, FairShare, WaitingQueue
from scheduler_proc.sequence import Request, Sequence
from scheduler_proc.simulation import SimulatedEngine, expected_outputs, simple_request
from scheduler_proc.state import Limits
from tests.support.schedulers import engines_with


def sequence(request_id, length=10, **changes):
    message = replace(simple_request(request_id, range(length), max_tokens=10), **changes)
    return Sequence(Request(message), 0, length + 10, Chain(-1))


def order(queue):
    return [waiting.request_id for waiting in queue.in_order()]


def test_first_come_first_served():
    queue = WaitingQueue("fcfs")
    sequences = [sequence(i, priority=-i) for i in range(4)]
    for waiting in sequences:
        queue.push(waiting, 0.0)
    assert order(queue) == [0, 1, 2, 3] and queue.token_count == 40
    queue.remove(sequences[1])
    queue.start(sequences[0])
    assert order(queue) == [2, 3] and queue.token_count == 20 and len(queue) == 2


def test_priorities_go_first_and_waiting_lifts():
    queue = WaitingQueue("priority")
    for number, (priority, at_s) in enumerate([(1, 0.0), (0, 1.0), (0, 0.5), (5, 0.0), (0, AGEING_S + 1)]):
        queue.push(sequence(number, priority=priority), at_s)
    assert order(queue) == [2, 1, 0, 4, 3]


def test_a_low_priority_request_runs_in_bounded_time():
    now = [0.0]
    run = SimulatedEngine(
        Limits(
            max_model_len=100, max_num_seqs=1, max_num_batched_tokens=16, block_size=4, block_count=20,
            policy="priority", run_ahead=0,
        ),
        lambda: now[0],
    )  # fmt: skip
    run.send(replace(simple_request(0, range(4)), priority=3))
    request_id = 0
    while (0, 0) not in run.outputs:
        request_id += 1
        run.send(replace(simple_request(request_id, range(4), max_tokens=4), priority=0))
        run.step()
        now[0] += 1.0
    assert len(run.reasons) <= 3 * AGEING_S + 1  # those that came before its wait outweighed its priority
    run.run()


urgent_engine = engines_with(
    max_model_len=100,
    max_num_seqs=2,
    max_num_batched_tokens=32,
    block_size=4,
    block_count=40,
    policy="priority",
    run_ahead=0,
)


def test_an_urgent_request_enters_next_and_takes_nothing_from_those_that_run():
    run = urgent_engine()
    for request_id in range(4):
        prompt = range(10 * request_id, 10 * request_id + 4)
        run.send(replace(simple_request(request_id, prompt, max_tokens=5 + 5 * request_id), priority=3))
    run.step()
    assert run.core.stats().running_count == 2
    run.send(replace(simple_request(9, range(4), max_tokens=2), priority=-3))
    run.run()
    ends = [request_id for request_id, _ in run.reasons]
    assert run.core.stats().preemptions == 0
    assert ends[:2] == [0, 9], f"ended in the order {ends}"


def test_when_blocks_are_short_the_least_urgent_gives_way():
    run = urgent_engine(block_count=8)
    messages = [
        replace(simple_request(0, range(8), max_tokens=16), priority=3),
        replace(simple_request(1, range(50, 58), max_tokens=16), priority=-3),
    ]
    for message in messages:
        run.send(message)
    victims = set()
    while not run.core.is_idle:
        run.step()
        victims |= {sequence.request_id for sequence in run.core.state.preempted}
    assert victims == {0}
    assert run.outputs == expected_outputs(messages)


def test_clients_take_turns():
    queue = WaitingQueue("fair")
    for number in range(6):
        queue.push(sequence(number, client_key="greedy"), 0.0)
    for number in range(6, 9):
        queue.push(sequence(number, client_key="modest"), 0.0)
    assert order(queue) == [0, 6, 1, 7, 2, 8, 3, 4, 5]


def test_tokens_count_not_requests():
    queue = WaitingQueue("fair")
    for number in range(3):
        queue.push(sequence(number, length=90, client_key="long"), 0.0)
    for number in range(3, 12):
        queue.push(sequence(number, length=10, client_key="short"), 0.0)
    assert order(queue)[:8] == [0, 3, 4, 5, 6, 7, 1, 8]


def test_an_idle_client_saves_nothing_up():
    queue = WaitingQueue("fair")
    busy = [sequence(number, client_key="busy") for number in range(5)]
    for waiting in busy:
        queue.push(waiting, 0.0)
    for waiting in busy[:4]:
        queue.start(waiting)
    for number in range(5, 8):
        queue.push(sequence(number, client_key="late"), 0.0)
    assert order(queue) == [5, 4, 6, 7]


def test_a_crowd_of_clients_is_not_remembered_for_ever():
    policy = FairShare()
    for number in range(3 * CLIENT_LIMIT):
        policy.place(sequence(number, client_key=str(number)), 0.0)
        assert len(policy._ends) <= CLIENT_LIMIT


def test_a_newcomer_overtakes_a_flood_of_another_client():
    run = SimulatedEngine(
        Limits(
            max_model_len=100, max_num_seqs=2, max_num_batched_tokens=32, block_size=4, block_count=40, policy="fair"
        )
    )
    flood = [replace(simple_request(i, range(i, i + 8)), client_key="flood") for i in range(40)]
    for message in flood:
        run.send(message)
    run.step()
    newcomer = replace(simple_request(99, range(8)), client_key="newcomer")
    run.send(newcomer)
    while (99, 0) not in run.reasons:
        assert run.step()
    assert len(run.reasons) <= 5
    run.run()
    assert run.outputs == expected_outputs([*flood, newcomer])
