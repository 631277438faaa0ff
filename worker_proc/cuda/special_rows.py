"""What the sampling kernel does not do for a row: some rules on its logits, and log probabilities with ranks.

All of it is torch operations on the device, in stream order, with no read of the device: a step with such rows runs its
forward pass without sampling, then what is here, then the sampling kernel. Other steps never come here. Rules of a slot
are applied in the order of `worker_proc.logit_rules`, before the kernel's own. Called by the GPU runner.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.messages import SlotInit, SlotSampling, TokenLogprobs
from kernels.sampling_state import fill_counts
from worker_proc.cuda.slots import DeviceSlots, KernelRules, is_penalised
from worker_proc.logprobs import LEAST_LOGPROB
from worker_proc.slots import SlotMirror


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


@dataclass(frozen=True)
class HostLogprobs:
    """Log probabilities of n positions on their way to pinned host memory; to be read after the step's event.

    logprobs, ranks: [n], of the chosen tokens; top_ids, top_logprobs: [n, k].
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def begin(cls, parts: Sequence[tuple[torch.Tensor, ...]]) -> "HostLogprobs":
        """Begin to copy what `SpecialRows.logprobs` gave, one part after another."""
        return cls(*(to_host(torch.cat(tensors)) for tensors in zip(*parts, strict=True)))

    def entry(self, index: int, row_index: int, count: int) -> TokenLogprobs:
        """Position `index` as it travels, with its `count` likeliest tokens."""
        top_ids = self.top_ids[index, :count].numpy().astype(np.int32)
        top = np.maximum(self.top_logprobs[index, :count].numpy(), np.float32(LEAST_LOGPROB))
        return TokenLogprobs(
            row_index,
            max(float(self.logprobs[index]), LEAST_LOGPROB),
            int(self.ranks[index]),
            array("i", top_ids.tobytes()),
            array("f", top.tobytes()),
        )


class SpecialRows:
    """Rules and log probabilities of one worker's slots.

    Args:
        vocabulary: ids from here on are never sampled.
    """

    def __init__(self, slots: DeviceSlots, mirror: SlotMirror, vocabulary: int) -> None:
        self._slots, self._mirror, self._vocabulary = slots, mirror, vocabulary
        self._rules: dict[int, SlotRules] = {}
        self._is_special = np.zeros(slots.slot_count, dtype=bool)

    def start(self, init: SlotInit) -> None:
        """A slot gets a request, after its tokens have been written."""
        slot, sampling = init.slot, init.sampling
        if is_penalised(sampling):
            tokens = self._slots.token_ids[slot, : len(init.token_ids)]
            fill_counts(self._slots.sampling.counts[slot], tokens, init.prompt_count)
        rules = self._rules_of(init)
        self._rules.pop(slot, None)
        if rules is not None:
            self._rules[slot] = rules
        self._is_special[slot] = rules is not None or sampling.logprobs >= 0

    def any_of(self, slots: np.ndarray) -> bool:
        """Whether one of these slots needs more than the kernel."""
        return bool(self._is_special[slots].any())

    def apply_rules(self, logits: torch.Tensor, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Change the logits [R, vocab] of the rows whose slots have rules, in place."""
        for row, slot in zip(rows, slots, strict=True):
            rules = self._rules.get(slot)
            if rules is not None:
                self._apply(rules, logits[row, : self._vocabulary], slot)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top_count: int) -> tuple[torch.Tensor, ...]:
        """Of `token_ids` [n] under raw `logits` [n, vocab], on the device: the tensors of a `HostLogprobs`."""
        logits = logits[:, : self._vocabulary].float()
        logits = torch.where(logits.isfinite(), logits, float("-inf"))
        known = (token_ids >= 0) & (token_ids < self._vocabulary)
        chosen = logits.gather(1, torch.where(known, token_ids, 0).long()[:, None])[:, 0]
        chosen = torch.where(known, chosen, float("-inf"))
        normaliser = logits.logsumexp(dim=-1)
        top = logits.topk(min(top_count, self._vocabulary), dim=-1)
        ranks = 1 + (logits > chosen[:, None]).sum(dim=-1)
        least = {"nan": LEAST_LOGPROB, "neginf": LEAST_LOGPROB}
        own = (chosen - normaliser).nan_to_num(**least)
        return own, ranks, top.indices, (top.values - normaliser[:, None]).nan_to_num(**least)

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
        sampling = init.sampling
        fitting = KernelRules.of(sampling)
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
        shift = np.zeros(self._vocabulary, dtype=np.float32)
        shift[np.asarray(sampling.bias_token_ids, dtype=np.int64)] = np.asarray(sampling.bias_values, np.float32)
        return to_device(torch.from_numpy(shift), self._slots.device)

    def _on_device(self, ids: Sequence[int]) -> torch.Tensor:
        return to_device(torch.tensor(list(ids), dtype=torch.int64), self._slots.device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that is only begun, in stream order."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is only begun, in stream order, to pinned memory."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
