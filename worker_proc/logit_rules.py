"""The rules by which a request changes its logits before sampling: allowed and banned ids, biases, penalties.

Order and formulas are vLLM's and those of `kernels/sampling.py`: allowed ids, bad words and the end ids that min_tokens
bans, then biases, then repetition, frequency and presence penalty. A rule holds only numbers; the tokens so far are
read from the slot's memory when it is applied.
"""

from dataclasses import dataclass

import numpy as np

from common.messages import SlotSampling


@dataclass(frozen=True)
class LogitRules:
    """The rules of one slot; token ids are int64 arrays."""

    sampling: SlotSampling
    allowed: np.ndarray
    bias_ids: np.ndarray
    bias_values: np.ndarray
    end_ids: np.ndarray
    bad_words: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, sampling: SlotSampling) -> "LogitRules | None":
        """The rules that follow from a slot's sampling parameters; None if there are none."""
        penalised = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        lists = sampling.bias_token_ids or sampling.allowed_token_ids or sampling.bad_token_ids
        if not (penalised or lists or (sampling.min_output_count and sampling.end_token_ids)):
            return None
        return cls(
            sampling=sampling,
            allowed=np.asarray(sampling.allowed_token_ids, dtype=np.int64),
            bias_ids=np.asarray(sampling.bias_token_ids, dtype=np.int64),
            bias_values=np.asarray(sampling.bias_values, dtype=np.float32),
            end_ids=np.asarray(sampling.end_token_ids, dtype=np.int64),
            bad_words=tuple(np.asarray(ids, dtype=np.int64) for ids in sampling.bad_token_ids if ids),
        )

    def apply(self, logits: np.ndarray, token_ids: np.ndarray, prompt_count: int) -> None:
        """Change one row of logits in place.

        Args:
            logits: float32 [vocab].
            token_ids: int32 [n], everything that the request holds so far; the first `prompt_count` are its prompt.
        """
        if len(self.allowed):
            allowed = logits[self.allowed]
            logits.fill(-np.inf)
            logits[self.allowed] = allowed
        for word in self.bad_words:
            start = len(token_ids) - (len(word) - 1)
            if start >= 0 and np.array_equal(token_ids[start:], word[:-1]):
                logits[word[-1]] = -np.inf
        output = token_ids[prompt_count:]
        if len(output) < self.sampling.min_output_count:
            logits[self.end_ids] = -np.inf
        logits[self.bias_ids] += self.bias_values
        self._penalise(logits, token_ids, output)

    def _penalise(self, logits: np.ndarray, token_ids: np.ndarray, output: np.ndarray) -> None:
        sampling = self.sampling
        if sampling.repetition_penalty != 1.0:
            seen = np.zeros(len(logits), dtype=bool)
            seen[token_ids] = True
            held = logits[seen]
            factor = np.float32(sampling.repetition_penalty)
            logits[seen] = np.where(held > 0, held / factor, held * factor)
        if len(output) and (sampling.frequency_penalty or sampling.presence_penalty):
            ids, counts = np.unique(output, return_counts=True)
            logits[ids] -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
            logits[ids] -= np.float32(sampling.presence_penalty)
