"""Reference body of `DSparkBlockSample`: correct, rate and draw the positions of every block from left to right.

An operation's inputs depend on its attributes, so the body is made for one head.
"""

from __future__ import annotations

import numpy as np
import onnx
from dspark.executors.tensorrt_bindings import SampleHead
from dspark_plugins.reference.sampling import DRAFT
from onnx import TensorProto

from dspark_build.export_graph import Graph, body_function
from dspark_build.export_sampling import SamplingParams, all_finite, drawn, shares, truncated_weights

__all__ = ["block_sample_function", "block_sample_inputs"]

_ALWAYS = (
    *("base_logits", "hidden", "anchors", "num_drafts", "positions"),
    *("seeds", "temperature", "top_k", "top_p", "min_p", "coupled"),
)


def block_sample_inputs(head: SampleHead) -> tuple[str, ...]:
    """Return the names of the inputs behind the eleven that every head has, in order (docs/tensorrt.md)."""
    return (
        *(("markov_in", "markov_out") if head.head else ()),
        *(("mix_weight", "mix_bias") if head.head > 1 else ()),
        *(("confidence_weight", "confidence_bias", "greedy_confidence") if head.confidence else ()),
        *(("draft_to_target",) if head.mapped else ()),
        *(("previous_rows",) if head.previous else ()),
    )


def block_sample_function(head: SampleHead) -> onnx.FunctionProto:
    """Return the body for one head (docs/tensorrt.md)."""
    g = Graph()
    parts = _Parts(g, head)
    num_sequences, block_size = g.size("base_logits", 0), g.size("base_logits", 1)
    vocab = g.op("Squeeze", g.size("base_logits", 2), g.ints(0))
    entries = g.op("Range", g.number(0), vocab, g.number(1))
    token_ids = g.to("draft_to_target", "i64") if head.mapped else entries
    params, hidden = SamplingParams.inputs(), g.to("hidden", "fp32")
    num_drafts, positions = g.to("num_drafts", "i64"), g.to("positions", "i64")
    sampled = g.any(g.op("Greater", "temperature", g.number(0, np.float32)))
    zero = g.number(0, np.float32)

    def step(b: Graph, k: str, carried: list[str]) -> list[str]:
        previous, alive, tokens, num_tokens, probs, rated, state = carried
        h = b.op("Gather", hidden, k, axis=1)
        logits = b.op("Gather", "base_logits", k, axis=1)
        embedded = parts.embedded(b, previous)
        if embedded is not None:
            mixed, state = parts.mixed(b, embedded, h, state)
            logits = b.op("Add", logits, b.linear(mixed, parts.out))
        confidence = parts.confidence(b, embedded, h)
        finite = all_finite(b, logits)
        alive = b.op("And", alive, b.op("And", finite, b.op("Greater", num_drafts, k)))
        if confidence is None:
            confidence = b.op("ConstantOfShape", num_sequences)
        else:
            confidence = parts.rated(b, confidence, logits, k)
            bad = b.op("Or", b.op("IsNaN", confidence), b.op("IsInf", confidence))
            alive = b.op("And", alive, b.op("Not", bad))

        def by_chance(c: Graph) -> list[str]:
            log_weights = truncated_weights(c, logits, finite, params)
            entry = drawn(
                c,
                log_weights,
                token_ids,
                params=params,
                position=c.op("Add", positions, k),
                purpose=DRAFT,
                lane=k,
            )
            q = c.to(shares(c, log_weights), "fp32")
            return [entry, c.op("Where", c.op("Unsqueeze", alive, c.ints(1)), q, zero)]

        def by_rank(c: Graph) -> list[str]:  # q is undefined at temperature 0
            best = c.op("ArgMax", logits, axis=1, keepdims=0)
            return [best, c.op("ConstantOfShape", c.op("Shape", logits))]

        entry, q = b.choose(sampled, by_chance, by_rank)
        token = b.op("Gather", token_ids, entry)
        column = b.ints(1)
        shown = b.to(b.op("Where", alive, token, b.number(0)), "i32")
        return [
            b.op("Where", alive, token, previous),
            alive,
            b.op("Concat", tokens, b.op("Unsqueeze", shown, column), axis=1),
            b.op("Add", num_tokens, b.to(alive, "i32")),
            b.op("Concat", probs, b.op("Unsqueeze", q, column), axis=1),
            b.op("Concat", rated, b.op("Unsqueeze", b.op("Where", alive, confidence, zero), column), axis=1),
            state,
        ]

    none = g.op("Concat", num_sequences, g.ints(0), axis=0)
    width = g.size("markov_in", 1) if head.head else g.ints(1)
    first = [
        g.to("anchors", "i64"),
        g.op("Expand", g.constant(np.array([True])), num_sequences),
        g.to(g.op("ConstantOfShape", none), "i32"),
        g.to(g.op("ConstantOfShape", num_sequences), "i32"),
        g.op("ConstantOfShape", g.op("Concat", none, g.size("base_logits", 2), axis=0)),
        g.op("ConstantOfShape", none),
        g.op("ConstantOfShape", g.op("Concat", num_sequences, width, axis=0)),
    ]
    found = g.loop(g.op("Squeeze", block_size, g.ints(0)), first, step)
    names = {"tokens": 2, "num_tokens": 3, "draft_probs": 4, "confidence_logits": 5}
    for name, at in names.items():
        g.op("Identity", found[at], name=name)
    return body_function(
        "DSparkBlockSample",
        g,
        inputs=(*_ALWAYS, *block_sample_inputs(head)),
        outputs=tuple(names),
        attributes=("head", "confidence", "mapped", "previous"),
    )


class _Parts:
    """The sequential head and the confidence head, in fp32."""

    def __init__(self, g: Graph, head: SampleHead) -> None:
        self._head = head
        # The table is looked up in its own type; what is multiplied is widened once, outside the loop.
        self.out = g.to("markov_out", "fp32") if head.head else ""
        if head.head > 1:
            self._weight, self._bias = g.to("mix_weight", "fp32"), g.to("mix_bias", "fp32")
        if head.confidence:
            weight = g.to("confidence_weight", "fp32")
            self._confidence = g.op("Unsqueeze", weight, g.ints(0))  # [1, d] or [1, d + r]

    def embedded(self, b: Graph, previous: str) -> str | None:
        """Return W1[x] [R, r] of target tokens [R] int64, None without a head."""
        if not self._head.head:
            return None
        rows = b.op("Gather", "previous_rows", previous) if self._head.previous else previous
        return b.to(b.op("Gather", "markov_in", rows), "fp32")

    def mixed(self, b: Graph, embedded: str, hidden: str, state: str) -> tuple[str, str]:
        """Return what multiplies the output matrix [R, r] and the next state."""
        if self._head.head == 1:
            return embedded, state
        if self._head.head == 2:
            seen = b.op("Concat", hidden, embedded, axis=1)
            gate = b.op("Sigmoid", b.linear(seen, self._weight, bias=self._bias))
            return b.op("Mul", gate, embedded), state
        joint = b.linear(b.op("Concat", state, embedded, hidden, axis=1), self._weight, bias=self._bias)
        gate, candidate, output = b.op_of("Split", joint, outputs=3, axis=1, num_outputs=3)
        gate = b.op("Sigmoid", gate)
        fresh = b.op("Mul", b.op("Sub", b.number(1, np.float32), gate), b.op("Tanh", candidate))
        return b.op("Tanh", output), b.op("Add", b.op("Mul", gate, state), fresh)

    def confidence(self, b: Graph, embedded: str | None, hidden: str) -> str | None:
        """Return the confidence logits [R], None without a confidence head."""
        if not self._head.confidence:
            return None
        seen = hidden
        if self._head.confidence == 2:
            assert embedded is not None
            seen = b.op("Concat", hidden, embedded, axis=1)
        rated = b.op("Squeeze", b.linear(seen, self._confidence), b.ints(1))
        return b.op("Add", rated, b.op("Cast", "confidence_bias", to=TensorProto.FLOAT))

    def rated(self, b: Graph, confidence: str, logits: str, k: str) -> str:
        """Return the confidence [R] of position k; at temperature 0 from the draft's own probability too."""
        zero = b.number(0, np.float32)
        top, every = (b.op(kind, logits, b.ints(1), keepdims=0) for kind in ("ReduceMax", "ReduceLogSumExp"))
        log_q = b.op("Min", b.op("Sub", top, every), zero)
        rest = b.op("Sub", b.number(1, np.float32), b.op("Exp", log_q))
        logit = b.op("Sub", log_q, b.op("Log", b.op("Max", rest, b.number(1e-4, np.float32))))
        weights = b.op("Gather", "greedy_confidence", k)  # [3]
        of_z, of_q, constant = (b.op("Gather", weights, b.number(i)) for i in range(3))
        both = b.op("Add", b.op("Mul", of_z, confidence), b.op("Mul", of_q, logit))
        greedy = b.op("LessOrEqual", "temperature", zero)
        return b.op("Where", greedy, b.op("Add", both, constant), confidence)
