"""What the sampling kernel does not do for a row: some rules on its logits, and log probabilities with ranks.

All of it is torch operations on the device, in stream order, with no read of the device: a step with such rows runs its
forward pass without sampling, then what is here, then the sampling kernel. Other steps never come here. Rules of a slot
are applied in the order of `worker_proc.logit_rules`, before the kernel's own. Called by the GPU runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.messages import NewSlots, SlotInit, SlotSampling
from kernels.sampling_state import fill_counts
from worker_proc.cuda.slot_records import KernelRules, has_rules, is_penalised
from worker_proc.cuda.slots import DeviceSlots
from worker_proc.logprobs import LogprobTable, logprob_tensors
from worker_proc.slots import known_ids
from worker_proc.step_inputs import PackedStep
from worker_proc.transfer import to_device, to_host


@dataclass(frozen=True)
class SlotRules:
    """The rules of one slot that the kernel lacks, as device tensors.

    Attributes:
        shift: float32 [vocabulary] added to the logits, or None.
        banned_until, banned: ids (int64) that cannot be sampled while fewer tokens are known, or None.
        bad_words: int64 ids each; the last cannot follow the others.
    """

    shift: torch.Tensor | None
    banned_until: int
    banned: torch.Tensor | None
    bad_words: tuple[torch.Tensor, ...]


class SpecialRows:
    """Rules and log probabilities of one worker's slots.

    Args:
        vocabulary: ids from here on are never sampled.
        fixed_order: what a row gets must not depend on the other rows, not even in the last bit.
    """

    def __init__(self, slots: DeviceSlots, vocabulary: int, *, fixed_order: bool = False) -> None:
        self._slots, self._vocabulary, self._fixed_order = slots, vocabulary, fixed_order
        self._rules: dict[int, SlotRules] = {}
        self._special: set[int] = set()

    def start(self, new: NewSlots) -> None:
        """Slots get requests, after their tokens have been written."""
        if self._special or not all(sampling.is_plain for sampling in new.samplings):
            for init in new:
                self._start(init)

    def _start(self, init: SlotInit) -> None:
        slot, sampling = init.slot, init.sampling
        if is_penalised(sampling):
            tokens = self._slots.token_ids[slot, : len(init.token_ids)]
            fill_counts(self._slots.sampling.counts[slot], tokens, init.prompt_count)
        rules = self._rules_of(init)
        self._rules.pop(slot, None)
        if rules is not None:
            self._rules[slot] = rules
        self._special.discard(slot)
        if rules is not None or sampling.logprobs >= 0:
            self._special.add(slot)

    def any_of(self, packed: PackedStep) -> bool:
        """Whether a row of this step needs more than the kernel."""
        return bool(self._special) and any(slot in self._special for _, slot in packed.sampled_pairs())

    def apply_rules(self, logits: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Change the logits [R, vocab] of these rows, whose slots may have rules, in place."""
        for row, slot in pairs:
            rules = self._rules.get(slot)
            if rules is not None:
                self._apply(rules, logits[row, : self._vocabulary], slot)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top_count: int) -> LogprobTable:
        """Of `token_ids` [n] under raw `logits` [n, vocab]; the table is filled once the stream has come this far."""
        columns = logprob_tensors(logits[:, : self._vocabulary], token_ids, top_count, row_by_row=self._fixed_order)
        return LogprobTable(*map(to_host, columns))

    def _apply(self, rules: SlotRules, logits: torch.Tensor, slot: int) -> None:
        known = self._slots.known_lengths[slot]
        tokens = self._slots.token_ids[slot]
        for word in rules.bad_words:
            places = known - (len(word) - 1) + torch.arange(len(word) - 1, device=known.device)
            matches = (tokens[places.clamp(min=0)] == word[:-1]) & (places >= 0)
            last = word[-1:]
            logits[last] = torch.where(matches.all(), float("-inf"), logits[last])
        if rules.banned is not None:
            logits[rules.banned] = torch.where(known < rules.banned_until, float("-inf"), logits[rules.banned])
        if rules.shift is not None:
            logits += rules.shift

    def _rules_of(self, init: SlotInit) -> SlotRules | None:
        """What of the slot's rules does not fit the kernel's tables."""
        if not has_rules(init.sampling):
            return None
        fitting = KernelRules.of(known_ids(init.sampling, self._slots.vocab_size))  # as `SlotRecord.of` has it
        sampling = known_ids(init.sampling, self._vocabulary)
        words = [word for word in sampling.bad_token_ids if word and not fitting.bad_words]
        has_banned = bool(sampling.min_output_count and sampling.end_token_ids) and not fitting.banned
        has_biases = bool(sampling.bias_token_ids) and not fitting.biases
        if not (words or has_banned or has_biases):
            return None
        return SlotRules(
            shift=self._shift(sampling) if has_biases else None,
            banned_until=init.prompt_count + sampling.min_output_count,
            banned=self._on_device(sampling.end_token_ids) if has_banned else None,
            bad_words=tuple(map(self._on_device, words)),
        )

    def _shift(self, sampling: SlotSampling) -> torch.Tensor:
        shift = np.zeros(self._slots.vocab_size, dtype=np.float32)
        shift[np.asarray(sampling.bias_token_ids, dtype=np.int64)] = np.asarray(sampling.bias_values, np.float32)
        return to_device(shift[: self._vocabulary], self._slots.device)

    def _on_device(self, ids: Sequence[int]) -> torch.Tensor:
        return to_device(np.array(ids, dtype=np.int64), self._slots.device)
