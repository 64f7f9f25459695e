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
        self.age = 0  # steps since answers were last made anew: whoever serves counts them
        self._version, self._longest = -1, _KEPT_STEPS
        self._alone: list[float] = []
        self._kept: dict[tuple[int, int, int, int], tuple[Float64, list[float]]] = {}

    def alone(self, count: int) -> list[float]:
        """Return the seconds of a step that drafts for a single sequence and no more, with 0, 1, ... drafts [count]."""
        if self.age >= self._longest or self._version != self.model.version or len(self._alone) != count:
            self._alone = self.seconds(num_sequences=1, prefill_tokens=0, num_blocks=1, count=count)[1]
        return self._alone

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
        if self.age >= self._longest or self._version != self.model.version:
            self._version, self.age = self.model.version, 0
            self._kept.clear()
            self._alone = []
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
