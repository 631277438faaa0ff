"""The scheduler at work, step by step, without a model: who computes how many tokens, and how many KV blocks are held.

    python examples/watch_the_scheduler.py [BLOCKS [TOKENS]]

Four requests with prompts of 5, 13, 3 and 8 tokens want 6 tokens each, from a KV cache of BLOCKS (16) blocks of 4
tokens, with a budget of TOKENS (8) per step. Try 7 blocks, or 16 and a budget of 40. docs/how-it-works.md explains what
it prints.
"""

import sys
from collections import Counter

from common.messages import StepPlan
from scheduler_proc.simulation import SimulatedEngine, simple_request
from scheduler_proc.state import Limits

PROMPT_LENGTHS = (5, 13, 3, 8)
OUTPUT_LENGTH = 6


def main(block_count: int = 16, token_budget: int = 8) -> None:
    """Run the four requests to their end, a line a step."""
    limits = Limits(
        max_model_len=64,
        max_num_seqs=len(PROMPT_LENGTHS),
        max_num_batched_tokens=token_budget,
        block_size=4,
        block_count=block_count,
        run_ahead=0,
    )
    engine = SimulatedEngine(limits)
    for number, length in enumerate(PROMPT_LENGTHS):
        engine.send(simple_request(number, range(100 * number, 100 * number + length), OUTPUT_LENGTH))
    print("step  " + "".join(f"request {letter}     " for letter in "ABCD") + "tokens  blocks held  preemptions")
    owners: dict[int, int] = {}
    while not engine.core.is_idle:
        while (plan := engine.plan()) is not None:
            owners |= {init.slot: init.token_ids[0] // 100 for init in plan.new_slots}
            row = cells(plan, owners)
            held = engine.core.state.pool.held_count
            preemptions = engine.core.state.counters.preemptions
            print(f"{plan.step_id:4}  {row}{plan.token_count:6}{held:7} of {block_count}{preemptions:10}")
        engine.deliver()
    ends = Counter(engine.reasons.values())
    print(f"requests with all of their {OUTPUT_LENGTH} tokens: {ends['length']} of {len(PROMPT_LENGTHS)}")


def cells(plan: StepPlan, owners: dict[int, int]) -> str:
    """What each request does in this step."""
    does = {owners[slot]: "decode 1" for slot in plan.decode_slots}
    for slot, count in zip(plan.chunk_slots, plan.chunk_token_counts, strict=True):
        does[owners[slot]] = f"prompt {count}"
    return "".join(f"{does.get(number, '-'):14}" for number in range(len(PROMPT_LENGTHS)))


if __name__ == "__main__":
    numbers = sys.argv[1:]
    if len(numbers) > 2 or not all(number.isdecimal() and int(number) for number in numbers):
        sys.exit(f"usage: {sys.argv[0]} [BLOCKS [TOKENS]]")
    main(*map(int, numbers))
