"""The inputs of one step, built on the device from what each slot keeps there and one small plan, in one launch.

For each row r of the plan, with s = row_slots[r], n = token_counts[r], c = computed_lengths[s], q = query_starts[r]:

    block_tables[s, first_blocks[r] + j] = appended_ids[append_starts[r] + j]        for all j of row r
    positions[q + i]     = c + i                                                     i < n
    token_ids[q + i]     = slot_token_ids[s, c + i]
    slot_mapping[q + i]  = block_tables[s, (c + i) // block_size] * block_size + (c + i) % block_size
    context_lengths[r]   = c + n
    sample_rows[r]       = q + n - 1 if c + n >= known_lengths[s] else -1            the row yields a token
    computed_lengths[s]  = c + n

So the host never needs to know a sampled token, or wait for one: it plans counts, and the device supplies the rest.

Inputs, per slot (the worker's state):
| tensor           | axes                | dtype | notes                                                        |
|------------------|---------------------|-------|--------------------------------------------------------------|
| slot_token_ids   | [slots, max_len]    | int32 | prompt, then the tokens as they are sampled                  |
| known_lengths    | [slots]             | int32 | tokens known; advanced by the sampling kernel                |
| computed_lengths | [slots]             | int32 | tokens whose K/V are stored; advanced here                   |
| block_tables     | [slots, max_blocks] | int32 | appended to here                                             |

The plan is one int32 buffer, one copy a step; `PlanLayout` (in `kernels.step_layout`) says where each part lies:
| part          | size     | notes                                                             |
|---------------|----------|-------------------------------------------------------------------|
| header        | 5        | row_count, decode_row_count (those rows come first), token_count, appended block count, |
|               |          | and how many words `kernels.scatter_words` writes, which lie behind the appended ids    |
| row_slots     | rows     | a slot appears in at most one row                                 |
| token_counts  | rows     | tokens that the row computes                                      |
| query_starts  | rows + 1 | cumulative token_counts, from 0                                   |
| first_blocks  | rows     | place in the slot's block table of its first appended block       |
| append_starts | rows + 1 | cumulative appended block counts, from 0                          |
| appended_ids  | blocks   |                                                                   |

Entries of the plan beyond row_count hold anything. Outputs, `rows` and `tokens` being the bucket's sizes:
| tensor          | axes       | dtype | padding holds   |
|-----------------|------------|-------|-----------------|
| token_ids       | [tokens]   | int32 | 0               |
| positions       | [tokens]   | int32 | 0               |
| slot_mapping    | [tokens]   | int64 | -1              |
| row_slots       | [rows]     | int32 | -1              |
| query_starts    | [rows + 1] | int32 | the token count |
| context_lengths | [rows]     | int32 | 0               |
| sample_rows     | [rows]     | int32 | -1              |

Measured on an H200 at commit 1356a8c by `python -m benchmarks.kernels.bench_step_inputs`: 1.9 us for one decode
row, 2.2 for 256, 15.6 for 255 of them and a chunk of 1,793 tokens.
"""

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from kernels.checks import check_tensor
from kernels.launch import launch_options, let_next_start, wait_for_inputs
from kernels.step_layout import HEADER, PlanLayout, SlotState, StepInputs

MAX_BLOCK = 1024  # tokens that one program handles at a time


def step_inputs_reference(
    plan: torch.Tensor, layout: PlanLayout, state: SlotState, inputs: StepInputs, block_size: int
) -> None:
    """The same in plain torch on the host: fills `inputs` and advances `state`, row by row."""
    row_count, _, token_count, *_ = plan[:HEADER].tolist()
    for tensor, padding in ((inputs.token_ids, 0), (inputs.positions, 0), (inputs.slot_mapping, -1),
                            (inputs.row_slots, -1), (inputs.context_lengths, 0), (inputs.sample_rows, -1),
                            (inputs.query_starts, token_count)):  # fmt: skip
        tensor.fill_(padding)
    starts, appends = plan[layout.query_starts].tolist(), plan[layout.append_starts].tolist()
    for row in range(row_count):
        slot, count = int(plan[layout.row_slots][row]), int(plan[layout.token_counts][row])
        first = int(plan[layout.first_blocks][row])
        new_ids = plan[layout.appended_ids][appends[row] : appends[row + 1]]
        state.block_tables[slot, first : first + len(new_ids)] = new_ids
        computed = int(state.computed_lengths[slot])
        position = torch.arange(computed, computed + count)
        rows = slice(starts[row], starts[row] + count)
        inputs.positions[rows] = position.int()
        inputs.token_ids[rows] = state.slot_token_ids[slot, position]
        block = state.block_tables[slot, position // block_size].long()
        inputs.slot_mapping[rows] = block * block_size + position % block_size
        inputs.row_slots[row], inputs.query_starts[row] = slot, starts[row]
        inputs.context_lengths[row] = computed + count
        if computed + count >= int(state.known_lengths[slot]):
            inputs.sample_rows[row] = starts[row] + count - 1
        state.computed_lengths[slot] = computed + count


@dataclass(frozen=True)
class StepInputsPlan:
    """One program a row, then programs for the padding tokens."""

    grid: tuple[int, ...]
    block: int


def launch_plan(row_count: int, token_count: int) -> StepInputsPlan:
    """The grid and tile for a bucket: a decode bucket's rows hold few tokens, a mixed bucket's may hold many."""
    block = min(MAX_BLOCK, max(32, triton.next_power_of_2(token_count // max(row_count, 1))))
    return StepInputsPlan((row_count + triton.cdiv(token_count, block),), block)


@triton.jit(do_not_specialize=["ROWS", "TOKENS"])
def _step_inputs_kernel(
    plan, slot_token_ids, known_lengths, computed_lengths, block_tables, token_stride, table_stride,
    token_ids, positions, slot_mapping, row_slots, query_starts, context_lengths, sample_rows, ROWS, TOKENS,
    ROW_SLOTS, TOKEN_COUNTS, QUERY_STARTS, FIRST_BLOCKS, APPEND_STARTS, APPENDED_IDS,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    row_count = tl.load(plan)  # the header's first and third numbers
    token_count = tl.load(plan + 2)
    if program >= ROWS:
        # Padding tokens of the bucket.
        token = (program - ROWS) * BLOCK + lane
        padding = (token >= token_count) & (token < TOKENS)
        tl.store(token_ids + token, 0, mask=padding)
        tl.store(positions + token, 0, mask=padding)
        tl.store(slot_mapping + token, -1, mask=padding)
        if program == ROWS:
            tl.store(query_starts + ROWS, token_count)
    elif program >= row_count:
        # A padding row of the bucket.
        tl.store(row_slots + program, -1)
        tl.store(query_starts + program, token_count)
        tl.store(context_lengths + program, 0)
        tl.store(sample_rows + program, -1)
    else:
        # 1. Locate the row, its slot and its new blocks.
        slot = tl.load(plan + ROW_SLOTS + program).to(tl.int64)
        count = tl.load(plan + TOKEN_COUNTS + program)
        start = tl.load(plan + QUERY_STARTS + program)
        first_block = tl.load(plan + FIRST_BLOCKS + program)
        append_start = tl.load(plan + APPEND_STARTS + program)
        append_count = tl.load(plan + APPEND_STARTS + program + 1) - append_start
        computed = tl.load(computed_lengths + slot)
        known = tl.load(known_lengths + slot)
        table = block_tables + slot * table_stride
        new_ids = plan + APPENDED_IDS + append_start
        # 2. Append to the block table. Step 3 reads new blocks from the plan, so it need not see these stores.
        for j in range(0, append_count, BLOCK):
            appended = j + lane < append_count
            block_id = tl.load(new_ids + j + lane, mask=appended)
            tl.store(table + first_block + j + lane, block_id, mask=appended)
        # 3. The row's tokens.
        for i in range(0, count, BLOCK):
            inside = i + lane < count  # the row's end
            position = computed + i + lane
            token_id = tl.load(slot_token_ids + slot * token_stride + position, mask=inside)
            index = position // BLOCK_SIZE
            new = (index >= first_block) & (index < first_block + append_count)
            kept_id = tl.load(table + index, mask=inside & (new == 0), other=0)
            new_id = tl.load(new_ids + index - first_block, mask=inside & new, other=0)
            block_id = tl.where(new, new_id, kept_id).to(tl.int64)
            target = start + i + lane
            tl.store(token_ids + target, token_id, mask=inside)
            tl.store(positions + target, position, mask=inside)
            tl.store(slot_mapping + target, block_id * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)
        # 4. The row itself, and the slot's progress.
        tl.store(row_slots + program, slot.to(tl.int32))
        tl.store(query_starts + program, start)
        tl.store(context_lengths + program, computed + count)
        tl.store(sample_rows + program, tl.where(computed + count >= known, start + count - 1, -1))
        tl.debug_barrier()  # every thread has read the old value
        tl.store(computed_lengths + slot, computed + count)


def _check(plan: torch.Tensor, layout: PlanLayout, state: SlotState, inputs: StepInputs) -> None:
    rows, tokens = inputs.row_slots.shape[0], inputs.token_ids.shape[0]
    slots = state.known_lengths.shape[0]
    shapes = {
        "slot_token_ids": (slots, None), "known_lengths": (slots,), "computed_lengths": (slots,),
        "block_tables": (slots, None), "token_ids": (tokens,), "positions": (tokens,), "slot_mapping": (tokens,),
        "row_slots": (rows,), "query_starts": (rows + 1,), "context_lengths": (rows,), "sample_rows": (rows,),
    }  # fmt: skip
    if plan.shape[0] < layout.size or layout.rows < rows:
        raise ValueError(
            f"plan: wanted at least {layout.size} elements and room for {rows} rows, "
            f"got {plan.shape[0]} elements and {layout.rows} rows"
        )
    check_tensor("plan", plan, (None,), torch.int32)
    for group in (state, inputs):
        for item in fields(group):
            dtype = torch.int64 if item.name == "slot_mapping" else torch.int32
            check_tensor(item.name, getattr(group, item.name), shapes[item.name], dtype, like=plan)


def step_inputs(plan: torch.Tensor, layout: PlanLayout, state: SlotState, inputs: StepInputs, block_size: int) -> None:
    """Fill `inputs` from the plan and the slots, and advance the slots. Shapes: the module's tables.

    Raises ValueError for a shape, dtype or device that differs from the tables.
    """
    _check(plan, layout, state, inputs)
    rows, tokens = inputs.row_slots.shape[0], inputs.token_ids.shape[0]
    launch = launch_plan(rows, tokens)
    if launch.grid[0] == 0:
        return
    parts = (layout.row_slots, layout.token_counts, layout.query_starts, layout.first_blocks, layout.append_starts,
             layout.appended_ids)  # fmt: skip
    _step_inputs_kernel[launch.grid](
        plan, state.slot_token_ids, state.known_lengths, state.computed_lengths, state.block_tables,
        state.slot_token_ids.stride(0), state.block_tables.stride(0),
        inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.row_slots, inputs.query_starts,
        inputs.context_lengths, inputs.sample_rows, rows, tokens, *(part.start for part in parts),
        BLOCK_SIZE=block_size, BLOCK=launch.block, num_warps=max(launch.block // 256, 1), **launch_options(plan),
    )  # fmt: skip
