"""Preemption by swap: what is moved to the host comes back instead of being computed again."""

from array import array

import pytest

from common.config import EngineConfig
from common.messages import PROTOCOL_VERSION, AbortRequests, WorkerReady
from scheduler_proc.main import limits_of
from scheduler_proc.sequence import Status
from scheduler_proc.simulation import SimulatedEngine, expected_outputs, simple_request
from scheduler_proc.state import Limits
from tests.support.schedulers import engines_with

RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1, 2])


engine = engines_with(
    max_model_len=200,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=4,
    block_count=9,
    host_block_count=40,
    preemption="swap",
    prefix_cache="off",
)


def requests(count=3):
    return [simple_request(i, range(i, i + 10), max_tokens=16) for i in range(count)]


def run_until(run, status):
    """Step until a sequence has the status; that sequence."""
    while True:
        for sequence in run.core.state.preempted:
            if sequence.status is status:
                return sequence
        assert run.step(), f"nobody was ever {status.name}"


@RUN_AHEAD
def test_nothing_is_computed_twice(run_ahead):
    run = engine(run_ahead=run_ahead)
    messages = requests()
    for message in messages:
        run.send(message)
    run.run()
    assert run.outputs == expected_outputs(messages)
    assert run.core.stats().preemptions > 0 and run.worker.swapped_out_blocks > 0
    assert run.worker.computed_tokens == 3 * (10 + 15)


@RUN_AHEAD
def test_without_room_on_the_host_it_is_computed_again(run_ahead):
    run = engine(run_ahead=run_ahead, host_block_count=1)
    messages = requests()
    for message in messages:
        run.send(message)
    run.run()
    assert run.outputs == expected_outputs(messages)
    assert run.core.stats().preemptions > 0 and run.worker.swapped_out_blocks == 0


@RUN_AHEAD
def test_an_abort_of_a_swapped_request_frees_the_hosts_blocks(run_ahead):
    run = engine(run_ahead=run_ahead)
    for message in requests():
        run.send(message)
    swapped = run_until(run, Status.SWAPPED)
    assert run.core.stats().swapped_count == 1 and run.core.state.host_pool.held_count > 0
    run.send(AbortRequests(array("i", [swapped.request_id])))
    run.core.check()
    run.run()
    assert run.core.state.host_pool.held_count == 0


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_blocks_that_are_still_on_the_device_are_not_brought_back(kind):
    """A swapped prompt that another request keeps on the device comes back from there."""
    run = engine(prefix_cache=kind, run_ahead=0, block_count=12)
    messages = [simple_request(i, range(16), max_tokens=16) for i in range(3)]
    for message in messages:
        run.send(message)
    swapped = run_until(run, Status.SWAPPED)
    brought_back = -1
    while swapped.status is Status.SWAPPED:
        plan = run.plan()
        brought_back = len(plan.swap_in_block_ids) // 2
        held = swapped.swapped_count
        run.deliver()
    assert brought_back == -(-held // 4) - 4
    run.run()
    assert run.outputs == expected_outputs(messages)


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_a_swapped_prompt_computes_what_its_logprobs_need(kind):
    """What it had not computed itself is not taken from another request, whose logits are not its own."""
    run = engine(prefix_cache=kind, run_ahead=0, block_count=14, max_num_batched_tokens=4)
    run.send(simple_request(0, range(16), max_tokens=40))
    for request_id in (1, 2):
        run.send(simple_request(request_id, range(100 * request_id, 100 * request_id + 4), max_tokens=14))
    while len(run.core.state.decoding) < 3:
        run.step()
    run.send(simple_request(3, range(16), max_tokens=2, prompt_logprobs=0))
    swapped = run_until(run, Status.SWAPPED)
    assert swapped.request_id == 3 and 0 < swapped.swapped_count < 16
    run.run()
    assert [entry.row_index for entry in run.prompt_logprobs[3, 0]] == list(range(1, 16))


def test_a_step_may_only_swap():
    """Without run-ahead, a swapped sequence's blocks are free only after the step that swaps them has come back."""
    run = engine(run_ahead=0, block_count=4)
    messages = [simple_request(i, range(i, i + 7), max_tokens=8) for i in range(2)]
    for message in messages:
        run.send(message)
    kinds = set()
    while (plan := run.plan()) is not None:
        kinds.add((plan.token_count > 0, bool(plan.swap_out_block_ids)))
        run.deliver()
    assert (False, True) in kinds
    run.run()
    assert run.outputs == expected_outputs(messages)


@pytest.mark.parametrize(("measured", "expected"), [(7_000_000_000, 7e9), (0, Limits.link_bytes_per_s)])
def test_the_worker_measures_the_link(measured, expected):
    ready = WorkerReady(
        protocol_version=PROTOCOL_VERSION, rank=0, max_model_len=200, block_size=4, block_count=8, host_block_count=8,
        block_bytes=1, vocab_size=997, device_name="cpu", link_bytes_per_s=measured,
    )  # fmt: skip
    assert limits_of(EngineConfig(), ready).link_bytes_per_s == expected


def first_victim(block_bytes):
    """The first preempted sequence, after how many seconds a prompt token, with steps of 1 ms for each token."""
    now_s = [0.0]
    limits = Limits(
        max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64, block_size=4, block_count=9, host_block_count=40,
        preemption="auto", block_bytes=block_bytes, link_bytes_per_s=1e9, run_ahead=0,
    )  # fmt: skip
    run = SimulatedEngine(limits, lambda: now_s[0])
    for message in requests():
        run.send(message)
    while not run.core.state.preempted:
        now_s[0] += 0.001 * run.plan().token_count
        if not run.core.state.preempted:
            run.deliver()
    return run.core.state.preempted[0], run.core.state.step_time.token_s


def test_auto_swaps_if_moving_the_blocks_twice_is_faster_than_computing_the_tokens():
    victim, token_s = first_victim(block_bytes=1)
    assert victim.status is Status.SWAPPED
    computing_s = victim.swapped_count * token_s
    equal_bytes = computing_s * 1e9 / (2 * len(victim.host_blocks))  # swapping out and in takes as long as computing
    assert first_victim(int(0.95 * equal_bytes))[0].status is Status.SWAPPED
    assert first_victim(int(1.05 * equal_bytes))[0].status is Status.PREEMPTED


@pytest.mark.parametrize("block_bytes", [1, 1 << 40])
def test_auto_does_not_change_the_tokens(block_bytes):
    run = engine(preemption="auto", block_bytes=block_bytes)
    messages = requests()
    for message in messages:
        run.send(message)
    run.run()
    assert run.core.stats().preemptions > 0
    assert run.outputs == expected_outputs(messages)


@pytest.mark.parametrize(
    ("preemption", "status", "counts"),
    [("recompute", Status.PREEMPTED, (2, 1, 0)), ("swap", Status.SWAPPED, (2, 0, 1))],
)
def test_figures_tell_swapped_requests_from_waiting_ones(preemption, status, counts):
    run = engine(preemption=preemption)
    for message in requests():
        run.send(message)
    run_until(run, status)
    stats = run.core.stats()
    assert (stats.running_count, stats.waiting_count, stats.swapped_count) == counts
