"""Who runs in a step: decode first, round robin, the largest chunks, several prompts at once, victims."""

from array import array
from dataclasses import replace
from random import Random

import pytest

from common.messages import AbortRequests
from scheduler_proc.sequence import Status
from scheduler_proc.simulation import expected_outputs, simple_request
from tests.support.schedulers import engines_with, prompt_of, watched_lookups

engine = engines_with(
    max_model_len=4000, max_num_seqs=64, max_num_batched_tokens=64, block_size=4, block_count=2000, run_ahead=0
)


def chunks(run, plan):
    """Request id -> tokens of its chunk in the plan."""
    by_slot = {slot: sequence.request_id for slot, sequence in run.core.state.in_flight[-1].chunk_sequences.items()}
    return {by_slot[slot]: count for slot, count in zip(plan.chunk_slots, plan.chunk_token_counts, strict=True)}


def test_decode_rows_come_first_and_chunks_take_the_rest():
    run = engine(max_num_batched_tokens=10)
    for i in range(3):
        run.send(simple_request(i, prompt_of(2, i), max_tokens=20))
    run.step()
    run.send(simple_request(9, prompt_of(30), max_tokens=2))
    plan = run.plan()
    assert len(plan.decode_slots) == 3 and chunks(run, plan) == {9: 7}
    assert list(plan.chunk_samples) == [0] and plan.sampled_slots == list(plan.decode_slots)


def test_a_plan_is_sent_before_it_is_recorded_and_says_the_same_afterwards():
    run = engine(run_ahead=1)
    core, sent = run.core, []
    for i in range(3):
        run.send(simple_request(i, prompt_of(20, i), max_tokens=2))

    def send(plan):
        sent.append((plan, plan.to_wire(), core.state.planned_step, len(core.state.in_flight)))

    for step in (1, 2):
        plan = core.plan_step(send)
        assert sent[-1] == (plan, plan.to_wire(), step - 1, step - 1)
    assert core.plan_step(send) is None and len(sent) == 2


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_nobody_is_served_twice_before_everyone_was_served_once(budget):
    run = engine()
    for i in range(7):
        run.send(simple_request(i, prompt_of(1, i), max_tokens=1000))
    run.step()
    state = run.core.state
    assert len(state.decoding) == 7
    state.limits = replace(state.limits, max_num_batched_tokens=budget)
    served = dict.fromkeys(range(7), 0)
    start = {key[0]: len(tokens) for key, tokens in run.outputs.items()}
    for _ in range(30):
        run.step()
        served = {key[0]: len(tokens) - start.get(key[0], 0) for key, tokens in run.outputs.items()}
        assert max(served.values()) - min(served.values()) <= 1, served
    assert sum(served.values()) == 30 * budget


def test_the_largest_chunk_that_fits_is_scheduled():
    run = engine(max_num_batched_tokens=50)
    run.send(simple_request(1, prompt_of(120), max_tokens=1))
    sizes = []
    while (plan := run.plan()) is not None:
        sizes.append(chunks(run, plan))
        run.deliver()
    assert sizes == [{1: 50}, {1: 50}, {1: 20}]


def test_a_chunk_is_cut_to_the_blocks_that_are_left():
    run = engine(max_num_batched_tokens=16, block_count=10)
    run.send(simple_request(1, prompt_of(8, 1), max_tokens=20))
    run.send(simple_request(2, prompt_of(30, 2), max_tokens=2))
    run.step()
    run.run()
    assert run.outputs == expected_outputs([
        simple_request(1, prompt_of(8, 1), max_tokens=20), simple_request(2, prompt_of(30, 2), max_tokens=2),
    ])  # fmt: skip


def test_short_prompts_behind_a_long_one_get_their_first_token_soon():
    run = engine(max_num_batched_tokens=64)
    run.send(simple_request(0, prompt_of(2000), max_tokens=1))
    for i in range(1, 21):
        run.send(simple_request(i, prompt_of(15, i), max_tokens=1))
    steps = 0
    while len(run.outputs) < 20:
        run.step()
        steps += 1
    assert (0, 0) not in run.outputs
    assert steps <= 20 * 15 / 32 + 2


def test_at_most_two_prompts_stay_unfinished_and_short_ones_pass_the_third():
    run = engine(max_num_batched_tokens=64)
    for i in range(4):
        run.send(simple_request(i, prompt_of(1000, i), max_tokens=1))
    run.send(simple_request(9, prompt_of(10, 9), max_tokens=1))
    assert chunks(run, run.plan()) == {0: 38, 1: 16, 9: 10}
    run.deliver()
    assert chunks(run, run.plan()) == {0: 48, 1: 16}
    run.run()
    assert len(run.outputs) == 5


def test_the_victim_is_the_last_in_order_and_resumes_before_new_ones():
    run = engine(block_count=9)
    for i in range(3):
        run.send(simple_request(i, prompt_of(10, i), max_tokens=12))
    run.send(simple_request(3, prompt_of(10, 3), max_tokens=2))
    state = run.core.state
    while not state.preempted:
        assert run.step()
    assert [sequence.request_id for sequence in state.preempted] == [2]
    resumed = state.preempted[0]
    while resumed.status is Status.PREEMPTED:
        assert state.requests[3].sequences[0].status is Status.WAITING
        assert run.step()
    run.run()
    assert run.core.stats().preemptions >= 1


def test_blocks_are_allocated_chunk_by_chunk():
    run = engine(max_num_batched_tokens=8)
    run.send(simple_request(1, prompt_of(30), max_tokens=2))
    held = []
    while run.plan() is not None:
        held.append(run.core.state.pool.held_count)
        run.deliver()
    assert held == [2, 4, 6, 8, 8]


def test_an_aborted_prompt_under_way_leaves_its_blocks_findable():
    run = engine(max_num_batched_tokens=16)
    run.send(simple_request(1, prompt_of(40), max_tokens=2))
    run.step()
    run.send(AbortRequests(array("i", [1])))
    run.send(simple_request(2, prompt_of(40), max_tokens=2))
    run.run()
    assert run.cached_counts == {(2, 0): 16}


def test_plans_stay_small():
    run = engine(max_num_seqs=256, max_num_batched_tokens=4096, block_size=16)
    for i in range(256):
        run.send(simple_request(i, prompt_of(1 + i % 9, i), max_tokens=40))
    run.step()
    run.max_plan_bytes = 0
    run.run()
    assert run.max_plan_bytes <= 2048


def test_run_ahead_bounds_the_plans_in_flight():
    run = engine(run_ahead=2)
    run.send(simple_request(1, prompt_of(5), max_tokens=50))
    assert [run.plan() is not None for _ in range(4)] == [True, True, True, False]
    run.deliver()
    assert run.plan() is not None and run.plan() is None


def test_a_prompt_that_waits_for_a_shared_start_is_looked_up_once():
    """Many equal long prompts behind one under way must not be looked up in every step."""
    run = engine(max_num_batched_tokens=64)
    lookups = watched_lookups(run)
    messages = [simple_request(i, prompt_of(1000), max_tokens=2) for i in range(10)]
    for message in messages:
        run.send(message)
    run.run()
    assert run.outputs == expected_outputs(messages)
    assert run.worker.computed_tokens == 1000 + 9 * 1 + 10 * 1
    assert len(lookups) <= 3 * 10
    assert run.plans <= -(-1000 // 64) + 3


def test_a_cached_prompt_does_not_wait_for_two_unfinished_ones():
    """What counts against the budget is what must be computed, not how long the prompt is."""
    run = engine(max_num_batched_tokens=64)
    run.send(simple_request(0, prompt_of(1000), max_tokens=1))
    run.run()
    for i in (1, 2, 3):
        run.send(simple_request(i, prompt_of(1000, i), max_tokens=1))
    run.step()
    run.send(simple_request(4, prompt_of(1000), max_tokens=1))
    run.step()
    assert run.outputs.keys() == {(0, 0), (4, 0)}
    run.run()


def test_prompts_behind_two_unfinished_ones_are_looked_up_now_and_then():
    run = engine(max_num_batched_tokens=64)
    lookups = watched_lookups(run)
    for i in range(5):
        run.send(simple_request(i, prompt_of(2000, i), max_tokens=1))
    run.run()
    assert run.plans >= 5 * 2000 // 64
    assert len(lookups) <= 5 + 3 * run.plans // 32


def test_a_prompt_waits_only_for_the_part_it_shares():
    run = engine(max_num_batched_tokens=64)
    run.send(simple_request(0, prompt_of(1000), max_tokens=1))
    run.send(simple_request(1, prompt_of(1000)[:20] + prompt_of(30, 1), max_tokens=1))
    steps = 0
    while (1, 0) not in run.outputs:
        run.step()
        steps += 1
    assert steps <= 4 and run.cached_counts[1, 0] == 20
    run.run()


def test_a_prompt_without_room_is_not_looked_up_in_every_step():
    run = engine(block_count=40, max_num_batched_tokens=64)
    run.send(simple_request(0, prompt_of(40), max_tokens=100))
    run.step()
    lookups = watched_lookups(run)
    run.send(simple_request(1, prompt_of(140, 1), max_tokens=4))
    steps = 0
    while run.step():
        steps += 1
    assert steps > 100 and len(lookups) <= 100 // 32 + 2
    assert len(run.reasons) == 2


@pytest.mark.parametrize(("prompt_length", "enters"), [(96 * 4, True), (97 * 4, False)])
def test_a_hundredth_of_the_blocks_stays_available_to_running_sequences(prompt_length, enters):
    run = engine(block_count=100, max_num_batched_tokens=1000)
    run.send(simple_request(0, prompt_of(9), max_tokens=3))
    run.step()
    assert run.core.state.pool.available_count == 97
    run.send(simple_request(1, prompt_of(prompt_length, 1), max_tokens=2))
    run.plan()
    assert (run.core.stats().running_count == 2) == enters
    run.run()
    assert len(run.reasons) == 2


def test_a_sequence_that_is_alone_may_have_every_block():
    run = engine(block_count=100, max_num_batched_tokens=1000)
    message = simple_request(0, prompt_of(400), max_tokens=1)
    run.send(message)
    run.run()
    assert run.outputs == expected_outputs([message])


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize(("lengths", "block_count"), [((3, 10, 60), 40), ((1, 1, 3, 10), 30)])
def test_no_new_sequence_enters_while_a_preempted_one_waits(run_ahead, lengths, block_count):
    """Neither one that finds no room nor one whose last tokens are still in flight is overtaken."""
    random = Random(run_ahead)
    run = engine(block_count=block_count, max_num_batched_tokens=24, run_ahead=run_ahead, max_num_seqs=6)
    for i in range(40):
        run.send(simple_request(i, prompt_of(random.choice(lengths), i), max_tokens=random.randrange(1, 40)))
    state, preempted_at_all = run.core.state, False
    while not run.core.is_idle:
        waiting_before, preempted_before = len(state.waiting), list(state.preempted)
        planned = run.plan() is not None
        if preempted_before and len(state.waiting) < waiting_before:
            assert not any(sequence in state.preempted for sequence in preempted_before)
        preempted_at_all = preempted_at_all or bool(preempted_before)
        if not planned:
            run.deliver()
    assert preempted_at_all
