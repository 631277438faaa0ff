"""What the scheduler knows of a request and of each of its samples. Data only; used by everything in this room."""

from array import array
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any

from common.messages import EARLY_POOLINGS, AddRequest, SlotSampling, TokenLogprobs
from common.sampling_params import sample_seed
from scheduler_proc.grammar import Grammar
from scheduler_proc.prefix_cache import Chain

Rank = tuple[float, int]
"""A place in the policy's order: what the policy says, then the number of the arrival."""


class Status(IntEnum):
    """Where a sequence stands.

    WAITING -> RUNNING -> DRAINING -> DONE, with PREEMPTED or SWAPPED between two times of RUNNING; DONE can follow any
    of them.

        WAITING    never had a slot
        RUNNING    has a slot; steps are planned for it
        PREEMPTED  lost its slot and its blocks; keeps its tokens, resumes before new ones
        SWAPPED    the same, but its K/V is in the host's blocks
        DRAINING   its last token is planned; only results are missing
        DONE       its finish has been reported, or nobody wants it any more
    """

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    SWAPPED = 3
    DRAINING = 4
    DONE = 5


class Request:
    """One AddRequest and the sequences that serve it.

    Attributes:
        message: as it came.
        end_token_ids: ids that end a sample.
        sequences: one per sample, by sample index.
        live_count: sequences that are not DONE; waiting_count: those that wait for their first slot.
        told_waiting: the frontend has been told that all of them wait, and nothing since.
        samplings: how its samples are sampled, by their number of prompt log probabilities, if it names many ids.
    """

    __slots__ = ("end_token_ids", "live_count", "message", "samplings", "sequences", "told_waiting", "waiting_count")

    def __init__(self, message: AddRequest) -> None:
        self.message = message
        self.end_token_ids = frozenset(message.end_token_ids)
        self.sequences: list[Sequence] = []
        self.live_count = 0
        self.waiting_count = 0
        self.told_waiting = False
        self.samplings: dict[int, SlotSampling] = {}


@dataclass(frozen=True, slots=True)
class Leader:
    """A sequence that is about to compute tokens which another one shares, and how many: that one waits for it."""

    sequence: "Sequence"
    shared_count: int


class Sequence:
    """One sample of a request.

    Counts, of tokens, at any time (in flight means planned, result not yet back):

        computed_count <= planned_len       K/V planned, in flight included
        len(tokens)    <= planned_len       prompt and output tokens known here
        planned_len    <= max_len           known tokens plus the most that is in flight

    Attributes:
        request, request_id, sample_index, end_token_ids: whose it is.
        tokens: int32, prompt and known output.
        prompt_count: how many of them are the prompt's.
        max_len: the length at which it ends.
        blocks: its block table.
        capacity: tokens that its blocks hold.
        host_blocks: while SWAPPED, the host's blocks with its K/V; swapped_count: tokens in them.
        slot: on the worker; -1 for none.
        last_step: the last step planned for it.
        chain: its place in the prefix cache.
        leader: another sequence that it waits for, since that one is computing tokens that both share.
        uncached_count: tokens that were not in the cache at the last lookup; retry_step: when to look again.
        cached_count: prompt tokens found in the cache when it first ran; -1 once that has been reported.
        rank: place in the policy's order; lower goes first.
        next_event_len: the known length at which a block of output can be indexed, or the sequence ends; with a grammar
            the next length.
        grammar: what its next token may be; None for anything.
        started_at_s: when the first plan was made that computed some of its prompt; below 0 before.
        preemption_count: how often it lost its slot before its end.
        prompt_logprobs: by position, collected until the first token is reported; None when not wanted (any more).

    Args:
        output: int32, the output that it had before scheduler and worker were started again.
    """

    __slots__ = (
        "blocks", "cached_count", "capacity", "chain", "computed_count", "end_token_ids", "grammar", "host_blocks",
        "last_step", "leader", "max_len", "next_event_len", "planned_len", "preemption_count", "prompt_count",
        "prompt_logprobs", "rank", "request", "request_id", "retry_step", "sample_index", "slot", "started_at_s",
        "status", "swapped_count", "tokens", "uncached_count",
    )  # fmt: skip

    def __init__(
        self, request: Request, sample_index: int, max_len: int, chain: Chain, output: "array[int] | None" = None
    ) -> None:
        message = request.message
        self.request = request
        self.request_id = message.request_id
        self.sample_index = sample_index
        self.end_token_ids = request.end_token_ids
        self.status = Status.WAITING
        self.tokens = array("i", message.prompt_token_ids)
        self.prompt_count = len(self.tokens)
        self.tokens.extend(output or ())
        self.max_len = max_len
        self.computed_count = 0
        self.planned_len = len(self.tokens)
        self.blocks: list[int] = []
        self.capacity = 0
        self.host_blocks: list[int] = []
        self.swapped_count = 0
        self.slot = -1
        self.last_step = 0
        self.chain = chain
        self.leader: Leader | None = None
        self.uncached_count = 0
        self.retry_step = 0
        self.cached_count = 0
        self.rank: Rank = (0.0, 0)
        self.next_event_len = 0
        self.started_at_s = -1.0
        self.preemption_count = 0
        self.grammar: Grammar | None = None
        wants_logprobs = message.params.prompt_logprobs is not None and sample_index == 0 and not output
        self.prompt_logprobs: dict[int, TokenLogprobs] | None = {} if wants_logprobs else None

    @property
    def needs_all_computed(self) -> bool:
        """Whether every prompt token has to be computed, even if cached: for log probabilities or an embedding."""
        return self.prompt_logprobs is not None or self.request.message.pooling in EARLY_POOLINGS

    @property
    def is_plannable(self) -> bool:
        """Whether its next step can be planned now. With a grammar, that is once its last token is known."""
        return self.grammar is None or self.planned_len == len(self.tokens)

    @property
    def unplanned_count(self) -> int:
        """Known tokens whose K/V is not planned: 0 or 1 while decoding, more before."""
        return self.planned_len - self.computed_count

    def note_start(self, now_s: float) -> None:
        """Note when the first plan was made that computes some of its prompt."""
        if self.started_at_s < 0:
            self.started_at_s = now_s

    def add_blocks(self, blocks: list[int], block_size: int) -> None:
        """Append to the block table."""
        self.blocks += blocks
        self.capacity = len(self.blocks) * block_size

    def expect_block(self, block_size: int) -> None:
        """Set `next_event_len`. A block can be indexed when the token after it is known, since then it is computed."""
        if self.grammar is not None:
            self.next_event_len = len(self.tokens) + 1
            return
        next_block_end = (len(self.tokens) - 1) // block_size * block_size + block_size
        self.next_event_len = min(next_block_end + 1, self.max_len)


def slot_seed(sequence: Sequence) -> int:
    """Of the sequence's sample."""
    message = sequence.request.message
    seed = message.params.seed
    return sample_seed(message.request_id if seed is None else seed, sequence.sample_index)


def shared_sampling(sequence: Sequence) -> SlotSampling:
    """What the worker needs to sample for the sequence, but for the seed: one object for all that sample in the same
    way, as most do. What names many ids, a bias or allowed ids is kept for the request's other samples alone."""
    message = sequence.request.message
    params = message.params
    prompt_logprobs = -1 if sequence.prompt_logprobs is None else params.prompt_logprobs or 0
    if known := sequence.request.samplings.get(prompt_logprobs):
        return known
    id_count = len(message.end_token_ids) + sum(map(len, message.bad_token_ids))
    sampling = (_sampling if id_count <= REMEMBERED_IDS else _sampling.__wrapped__)(
        _numbers_of(params), prompt_logprobs, message.end_token_ids, message.bad_token_ids,
        sequence.grammar is not None, message.pooling,
    )  # fmt: skip
    if params.logit_bias or params.allowed_token_ids:
        sampling = replace(
            sampling,
            bias_token_ids=array("i", params.logit_bias.keys()),
            bias_values=array("f", params.logit_bias.values()),
            allowed_token_ids=array("i", params.allowed_token_ids or ()),
        )
    elif id_count <= REMEMBERED_IDS:
        return sampling
    sequence.request.samplings[prompt_logprobs] = sampling
    return sampling


TEMPERATURE_FLOOR = 1e-5
"""Below it a request is greedy: logits divided by less leave the range of float32."""
REMEMBERED_IDS = 128
"""How a request samples is remembered unless it names more token ids: 256 requests may name many megabytes of them."""

_numbers_of = attrgetter(
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "logprobs",
)  # fmt: skip


@lru_cache(256)
def _sampling(
    numbers: tuple[Any, ...], prompt_logprobs: int, end_token_ids: tuple[int, ...],
    bad_token_ids: tuple[tuple[int, ...], ...], masked: bool, pooling: str,
) -> SlotSampling:  # fmt: skip
    temperature, top_k, top_p, min_p, presence, frequency, repetition, min_tokens, logprobs = numbers
    return SlotSampling(
        temperature=0.0 if temperature < TEMPERATURE_FLOOR else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        min_output_count=min_tokens,
        logprobs=-1 if logprobs is None else logprobs,
        prompt_logprobs=prompt_logprobs,
        end_token_ids=end_token_ids,
        bad_token_ids=bad_token_ids,
        masked=masked,
        pooling=pooling,
    )
