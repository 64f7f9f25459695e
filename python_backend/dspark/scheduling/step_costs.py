"""What a step costs by the number of its drafts, asked of the cost model once for several steps.

The answer for a batch of the same size moves slowly, and asking takes longer than most decisions; so it is kept until
the model has learnt something, or for a few steps (contexts grow).
"""

from __future__ import annotations

import numpy as np

from dspark.scheduling.cost_model import CostModel
from dspark.scheduling.interface import Float64

__all__ = ["StepCosts"]

_KEPT_STEPS, _KEPT_STEPS_FEW, _FEW = 16, 64, 4  # contexts of few sequences grow slowly
_KEPT_ANSWERS = 32


class StepCosts:
    """Answers out of a cost model.

    Arguments:
        model: corrected by its owner.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.context_per_sequence = 0.0  # cached tokens, mean of the last step
        self._version, self._age, self._longest = -1, 0, _KEPT_STEPS
        self._kept: dict[tuple[int, int, int, int], tuple[Float64, list[float]]] = {}

    def next_step(self) -> None:
        """Say that a step begins."""
        self._age += 1
        self._forget_old()

    def learn(self) -> None:
        """Take in the steps that the model has only gathered so far."""
        self.model.flush()
        self._forget_old()

    def _forget_old(self) -> None:
        if self._age >= self._longest or self._version != self.model.version:
            self._version, self._age = self.model.version, 0
            self._kept.clear()

    def seconds(
        self, *, num_sequences: int, prefill_tokens: int, num_blocks: int, count: int
    ) -> tuple[Float64, list[float]]:
        """Return the seconds of the step with 0, 1, ... drafts, [count] as array and as list. Not to be written to.

        Drafts in a pass with many prompt rows cost what they cost there. But the prompts' own time is left out:
        whoever decodes faster only meets the next prompt sooner, so it is no fixed cost that drafts could share.

        Arguments:
            num_sequences: R, decoding.
            num_blocks: blocks whose drafting is part of the step.
        """
        key = (num_sequences, prefill_tokens, num_blocks, count)
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _KEPT_ANSWERS:
                self._kept.clear()
            self._longest = _KEPT_STEPS if num_sequences > _FEW else _KEPT_STEPS_FEW
            seconds = self._ask(num_sequences, prefill_tokens, count)
            if num_blocks:
                seconds = seconds + self.model.draft_s(num_blocks)
            kept = self._kept[key] = (seconds, seconds.tolist())
        return kept

    def _ask(self, num_sequences: int, prefill_tokens: int, count: int) -> Float64:
        context_tokens = int(self.context_per_sequence * num_sequences)
        seconds = self.model.verify_s(
            num_sequences + prefill_tokens, count, num_sequences=num_sequences, context_tokens=context_tokens
        )
        if not prefill_tokens:
            return seconds
        alone = self.model.verify_s(
            num_sequences, 1, num_sequences=num_sequences, context_tokens=context_tokens
        )
        return np.asarray(seconds - max(float(seconds[0] - alone[0]), 0.0))
