"""The sequential head and the confidence head on the host, for requests whose drafts look at their text.

Small products in float32; blocks that the device draws never come here.
"""

from __future__ import annotations

import numpy as np

from dspark.drafters.checkpoint import DrafterCheckpoint
from dspark.executors.interface import Float32, Int32

__all__ = ["HostHead"]


class HostHead:
    """Steps of one drafter's heads (algorithm.md, section 2.2)."""

    def __init__(self, checkpoint: DrafterCheckpoint) -> None:
        self.config = config = checkpoint.config
        self._rows = checkpoint.previous_to_row
        weights = checkpoint.weights
        self._w1 = self._w2 = self._mix = self._mix_bias = self._confidence = None
        self._confidence_bias = np.float32(0.0)
        if config.markov_rank:
            self._w1 = weights.float32("markov_head.markov_w1.weight")
            self._w2 = weights.float32("markov_head.markov_w2.weight")
            mix = {"gated": "gate_proj", "rnn": "joint_proj"}.get(config.markov_head_type)
            if mix is not None:
                self._mix = weights.float32(f"markov_head.{mix}.weight")
                self._mix_bias = weights.float32(f"markov_head.{mix}.bias")
        if config.enable_confidence_head:
            self._confidence = weights.float32("confidence_head.proj.weight")[0]
            self._confidence_bias = weights.float32("confidence_head.proj.bias")[0]

    def initial_state(self, num_sequences: int) -> Float32 | None:
        """Return s_0 [R, r] = 0 of the RNN head, None for the others."""
        if self.config.markov_rank and self.config.markov_head_type == "rnn":
            return np.zeros((num_sequences, self.config.markov_rank), np.float32)
        return None

    def step(
        self, *, previous: Int32, hidden: Float32, state: Float32 | None
    ) -> tuple[Float32 | None, Float32 | None]:
        """Return B_k [R, Vd] (None at rank 0) and the next state [R, r] (None unless RNN)."""
        embedded = self._embedded(previous)
        if embedded is None or self._w2 is None:
            return None, None
        if self._mix is None or self._mix_bias is None:
            return embedded @ self._w2.T, None
        if self.config.markov_head_type == "gated":
            gate = _sigmoid(np.concatenate([hidden, embedded], 1) @ self._mix.T + self._mix_bias)
            return (gate * embedded) @ self._w2.T, None
        assert state is not None
        joint = np.concatenate([state, embedded, hidden], 1) @ self._mix.T + self._mix_bias
        gate, candidate, output = np.split(joint, 3, axis=1)
        gate = _sigmoid(gate)
        after = (gate * state + (1 - gate) * np.tanh(candidate)).astype(np.float32)
        return np.tanh(output) @ self._w2.T, after

    def confidence(self, *, previous: Int32, hidden: Float32) -> Float32 | None:
        """Return the logits of c_k [R], None without a confidence head."""
        if self._confidence is None:
            return None
        seen, embedded = hidden, self._embedded(previous)
        if self.config.confidence_head_with_markov:
            assert embedded is not None
            seen = np.concatenate([hidden, embedded], 1)
        rated: Float32 = (seen @ self._confidence + self._confidence_bias).astype(np.float32)
        return rated

    def _embedded(self, previous: Int32) -> Float32 | None:
        """Return W1[x_{k-1}] [R, r], None at rank 0."""
        if self._w1 is None:
            return None
        found: Float32 = self._w1[previous if self._rows is None else self._rows[previous]]
        return found


def _sigmoid(x: Float32) -> Float32:
    with np.errstate(over="ignore"):  # exp(-x) = inf is a gate that is shut
        return (1 / (1 + np.exp(-x))).astype(np.float32)
