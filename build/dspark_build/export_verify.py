"""Reference body of `DSparkVerify`: what `dspark_plugins.reference.verify` is in torch, sequence after sequence.

An operation's inputs depend on its attributes, so the body is made for one set of them. Every sequence walks
max_depth + 1 times at most; a walk that has ended carries its result on. Chains that are verified as blocks do not
walk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx
from dspark_plugins.reference.sampling import ACCEPT, REPLACE, SAMPLE
from onnx import TensorProto

from dspark_build.export_graph import Graph, body_function
from dspark_build.export_sampling import (
    SamplingParams,
    all_finite,
    drawn,
    inverse_cdf,
    shares,
    truncated_weights,
    uniform,
)

__all__ = ["verify_function", "verify_inputs"]


def verify_inputs(*, tree: bool, probs: bool, mapped: bool) -> tuple[str, ...]:
    """Return the names of the inputs, in order (docs/tensorrt.md)."""
    return (
        *("logits", "tokens", "query_start"),
        *(("parents",) if tree else ()),
        *(("draft_probs", "prob_rows") if probs else ()),
        *(("target_to_draft",) if mapped else ()),
        *("positions", "seeds", "temperature", "top_k", "top_p", "min_p", "coupled"),
    )


def verify_function(*, tree: bool, probs: bool, mapped: bool) -> onnx.FunctionProto:
    """Return the body for one set of attributes (docs/tensorrt.md)."""
    g = Graph()
    depth = g.attribute("max_depth", "int")
    walk = _Walk(g, depth, tree=tree, probs=probs, mapped=mapped)
    none = g.op("ConstantOfShape", g.ints(0))
    rows = g.op("ConstantOfShape", g.op("Concat", g.ints(0), g.op("Unsqueeze", depth, g.ints(0)), axis=0))
    first = [g.to(none, "i64"), g.to(rows, "i64"), g.to(none, "i64")]

    def sequence(b: Graph, index: str, carried: list[str]) -> list[str]:
        found = walk.sequence(b, index)
        return [
            b.op("Concat", before, b.op("Unsqueeze", one, b.ints(0)), axis=0)
            for before, one in zip(carried, found, strict=True)
        ]

    count = g.op("Squeeze", g.size("positions", 0), g.ints(0))
    found = g.loop(count, first, sequence)
    for name, value in zip(("accepted", "path", "next_token"), found, strict=True):
        g.op("Cast", value, name=name, to=TensorProto.INT32)
    return body_function(
        "DSparkVerify",
        g,
        inputs=verify_inputs(tree=tree, probs=probs, mapped=mapped),
        outputs=("accepted", "path", "next_token"),
        attributes=("max_depth", "tree", "probs", "mapped"),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """One sequence."""

    start: str  # [1] int64, its first row
    tokens: str  # [n] int64
    parents: str  # [n] int64
    position: str  # [1] int64, of the first drafted token
    params: SamplingParams  # of [1]


class _Walk:
    """Writes how one sequence goes from its anchor to the token that the target adds."""

    def __init__(self, g: Graph, depth: str, *, tree: bool, probs: bool, mapped: bool) -> None:
        self._depth, self._tree, self._probs, self._mapped = depth, tree, probs, mapped
        self._ends, self._tokens = g.to("query_start", "i64"), g.to("tokens", "i64")
        self._positions = g.to("positions", "i64")
        self._parents = g.to("parents", "i64") if tree else ""
        self._vocab = g.op("Squeeze", g.size("logits", 1), g.ints(0))
        self._entries = g.op("Range", g.number(0), self._vocab, g.number(1))
        self._path = g.op("Expand", g.constant(np.array([-1], np.int64)), g.op("Unsqueeze", depth, g.ints(0)))
        self._steps = g.op("Range", g.number(0), depth, g.number(1))
        if mapped:
            inverse = g.to("target_to_draft", "i64")
            self._drafted = g.op("GreaterOrEqual", inverse, g.number(0))
            self._inverse = g.op("Max", inverse, g.number(0))

    def sequence(self, b: Graph, index: str) -> list[str]:
        """Return accepted [], path [max_depth] and next token [], int64."""
        at = b.op("Unsqueeze", index, b.ints(0))
        start = b.op("Gather", self._ends, at)
        end = b.op("Gather", self._ends, b.op("Add", at, b.ints(1)))
        n = b.op("Squeeze", b.op("Sub", end, start), b.ints(0))
        params = SamplingParams.inputs()
        rows = _Rows(
            start=start,
            tokens=b.take(self._tokens, start, end),
            parents=b.take(self._parents, start, end)
            if self._tree
            else b.op("Range", b.number(-1), b.op("Sub", n, b.number(1)), b.number(1)),
            position=b.op("Gather", self._positions, at),
            params=replace(
                params,
                **{name: b.op("Gather", name, at) for name in SamplingParams.__dataclass_fields__},
            ),
        )
        if self._tree or not self._probs:
            return self._walked(b, rows, n)
        num_drafts = b.op("Min", b.op("Sub", n, b.number(1)), self._depth)
        return b.choose(
            self._goes_by_block(b, rows, num_drafts),
            lambda c: self._block(c, rows, num_drafts),
            lambda c: self._walked(c, rows, n),
        )

    def _walked(self, b: Graph, rows: _Rows, n: str) -> list[str]:
        done = b.op("Equal", n, b.number(0))
        trips = b.op("Add", self._depth, b.number(1))
        first = [b.number(0), b.number(0), self._path, b.number(-1), done]

        def step(c: Graph, _: str, carried: list[str]) -> list[str]:
            return c.choose(carried[4], lambda _: carried, lambda d: self._step(d, rows, carried))

        _, accepted, path, token, _ = b.loop(trips, first, step)
        return [accepted, path, token]

    def _goes_by_block(self, b: Graph, rows: _Rows, num_drafts: str) -> str:
        """Return whether a drawn seed judges several drafts of a chain, one of them drawn at least, [] bool."""
        start, end = self._drafts_of(b, rows, num_drafts)
        drawn_rows = b.to(b.take("prob_rows", start, end), "i64")
        drawn_ = b.op("GreaterOrEqual", b.op("Concat", drawn_rows, b.ints(-1), axis=0), b.number(0))
        by_draws = b.op("Not", b.op("Squeeze", self._own_draws(b, rows), b.ints(0)))
        several = b.op("Greater", num_drafts, b.number(1))
        return b.op("And", b.op("And", by_draws, several), b.any(drawn_))

    @staticmethod
    def _drafts_of(b: Graph, rows: _Rows, num_drafts: str) -> tuple[str, str]:
        """Return where the rows of a chain's drafts start and end, [1] each."""
        start = b.op("Add", rows.start, b.ints(1))
        return start, b.op("Add", start, num_drafts)

    @staticmethod
    def _own_draws(b: Graph, rows: _Rows) -> str:
        """Return whether drafts must be what the target draws, [1] bool."""
        greedy = b.op("LessOrEqual", rows.params.temperature, b.number(0, np.float32))
        return b.op("Or", greedy, b.op("Cast", rows.params.coupled, to=TensorProto.BOOL))

    def _block(self, b: Graph, rows: _Rows, m: str) -> list[str]:
        """Return what `sequence` does for m >= 2 drafts that are accepted by joint weights."""
        nothing, whole = b.number(0.0, np.float64), b.number(1.0, np.float64)
        start, end = self._drafts_of(b, rows, m)
        size = b.op("Unsqueeze", m, b.ints(0))
        params = replace(
            rows.params,
            **{
                name: b.op("Expand", getattr(rows.params, name), b.op("Add", size, b.ints(1)))
                for name in SamplingParams.__dataclass_fields__
            },
        )
        logits = b.to(b.take("logits", rows.start, end), "fp32")  # [m + 1, V]
        finite = all_finite(b, logits)
        log_weights = truncated_weights(b, logits, finite, params)
        p = b.take(shares(b, log_weights), b.ints(0), size)  # [m, V]
        tokens = b.take(rows.tokens, b.ints(1), b.op("Add", size, b.ints(1)))
        q = self._chain_drafted_from(b, b.take("prob_rows", start, end), tokens)
        weights = self._joint_weights(b, p, q, tokens, m)  # [m + 1]
        before = b.op("Unsqueeze", b.take(weights, b.ints(0), size), b.ints(1))
        left = b.op("Max", b.op("Sub", b.op("Mul", before, p), q), nothing)
        mass = b.op("ReduceSum", left, b.ints(1), keepdims=0)  # [m]
        # Drafts in front of the first row that cannot be read.
        flags = b.op("Concat", b.to(b.take(finite, b.ints(0), size), "i32"), b.to(b.ints(0), "i32"), axis=0)
        last = b.op("ArgMin", flags, axis=0, keepdims=0)
        index = b.op("Range", b.number(1), b.op("Add", m, b.number(1)), b.number(1))  # of drafts, [m]
        behind = b.op("Concat", b.take(mass, b.ints(1), size), b.constant(np.zeros(1)), axis=0)
        own = b.take(weights, b.ints(1), b.op("Add", size, b.ints(1)))
        total = b.op("Sub", b.op("Add", behind, whole), own)
        some = b.op("Greater", total, nothing)
        inner = b.op("Where", some, b.op("Div", behind, b.op("Where", some, total, whole)), whole)
        threshold = b.op("Where", b.op("Equal", index, last), own, inner)
        lane = b.op("Sub", index, b.number(1))
        u = uniform(b, rows.params.seeds, b.op("Add", rows.position, lane), ACCEPT, lane)
        hits = b.op("And", b.op("Less", u, threshold), b.op("LessOrEqual", index, last))
        accepted = b.op("ReduceMax", b.op("Where", hits, index, b.number(0)), keepdims=0)
        at = b.op("Unsqueeze", accepted, b.ints(0))
        position = b.op("Add", rows.position, accepted)

        def added(c: Graph) -> list[str]:
            token = drawn(
                c,
                c.op("Gather", log_weights, at),
                self._entries,
                params=rows.params,
                position=position,
                purpose=SAMPLE,
                lane=c.number(0),
            )
            good = c.op("Gather", finite, accepted)
            return [c.op("Where", good, c.op("Squeeze", token, c.ints(0)), c.number(-1))]

        def replaced(c: Graph) -> list[str]:
            empty = c.op("LessOrEqual", c.op("Gather", mass, accepted), nothing)
            kept = c.op("Where", empty, c.op("Gather", p, at), c.op("Gather", left, at))
            u = uniform(c, rows.params.seeds, position, REPLACE, c.number(0))
            return [c.op("Squeeze", inverse_cdf(c, kept, u), c.ints(0))]

        (token,) = b.choose(b.op("Equal", accepted, last), added, replaced)
        on_path = b.op("Less", self._steps, accepted)
        path = b.op("Where", on_path, b.op("Add", self._steps, b.number(1)), b.number(-1))
        return [accepted, path, token]

    def _joint_weights(self, b: Graph, p: str, q: str, tokens: str, m: str) -> str:
        """Return w_0 = 1, w_1, ..., w_m, [m + 1] double, of p and q [m, V] and tokens [m]."""
        at = b.op("Unsqueeze", tokens, b.ints(1))
        p_at, q_at = (b.op("Squeeze", b.op("GatherElements", x, at, axis=1), b.ints(1)) for x in (p, q))

        def weigh(c: Graph, k: str, carried: list[str]) -> list[str]:
            weight, weights = carried
            joint = c.op("Mul", weight, c.op("Gather", p_at, k))
            chance = c.op("Gather", q_at, k)
            below = c.op("Less", joint, chance)
            ratio = c.op("Div", joint, c.op("Where", below, chance, c.number(1.0, np.float64)))
            some = c.op("Cast", c.op("Greater", joint, c.number(0.0, np.float64)), to=TensorProto.DOUBLE)
            weight = c.op("Where", below, ratio, some)
            return [weight, c.op("Concat", weights, c.op("Unsqueeze", weight, c.ints(0)), axis=0)]

        one = b.constant(np.ones(1))
        return b.loop(m, [b.number(1.0, np.float64), one], weigh)[1]

    def _chain_drafted_from(self, b: Graph, prob_rows: str, tokens: str) -> str:
        """Return q of drafts over the target's vocabulary, [m, V] double."""
        drafted = b.op("Unsqueeze", tokens, b.ints(1))
        one_hot = b.op("Cast", b.op("Equal", self._entries, drafted), to=TensorProto.DOUBLE)
        rows = b.to(prob_rows, "i64")
        found = b.op("Gather", "draft_probs", b.op("Max", rows, b.number(0)))
        found = b.op("Cast", found, to=TensorProto.DOUBLE)
        if self._mapped:
            spread = b.op("Gather", found, self._inverse, axis=1)
            found = b.op("Where", self._drafted, spread, b.number(0.0, np.float64))
        known = b.op("Unsqueeze", b.op("GreaterOrEqual", rows, b.number(0)), b.ints(1))
        return b.op("Where", known, found, one_hot)

    def _step(self, b: Graph, rows: _Rows, carried: list[str]) -> list[str]:
        """Go one node on, or end: node, nodes on the path, path, token, whether it ended."""
        node, count, path, _, _ = carried
        row = b.op("Gather", "logits", b.op("Add", rows.start, node))  # [1, V]
        row = b.to(row, "fp32")
        finite = all_finite(b, row)
        log_weights = truncated_weights(b, row, finite, rows.params)
        position = b.op("Add", rows.position, count)
        n = b.op("Squeeze", b.op("Shape", rows.tokens), b.ints(0))
        order = b.op("Range", b.number(0), n, b.number(1))
        below = b.op("And", b.op("Equal", rows.parents, node), b.op("Greater", order, node))
        below = b.op("And", below, b.op("Less", count, self._depth))
        children = b.op("Squeeze", b.op("NonZero", below), b.ints(0))  # [c], in order
        num_children = b.op("Squeeze", b.op("Shape", children), b.ints(0))
        own_draws = self._own_draws(b, rows)
        by_rejection = b.op(
            "And",
            b.op("Not", b.op("Squeeze", own_draws, b.ints(0))),
            b.op("Greater", num_children, b.number(0)),
        )

        def judged(c: Graph) -> list[str]:
            return self._judged(c, rows, children, num_children, log_weights, position, count)

        def followed(c: Graph) -> list[str]:
            token = drawn(
                c,
                log_weights,
                self._entries,
                params=rows.params,
                position=position,
                purpose=SAMPLE,
                lane=c.number(0),
            )
            hits = c.op("Equal", c.op("Gather", rows.tokens, children), token)
            chosen = c.op("Compress", children, hits, axis=0)
            reached = c.op("Concat", chosen, c.ints(-1), axis=0)  # the first hit, -1 without one
            return [c.op("Gather", reached, c.number(0)), c.op("Squeeze", token, c.ints(0))]

        reached, token = b.choose(by_rejection, judged, followed)
        good = b.op("Squeeze", finite, b.ints(0))
        goes_on = b.op("And", good, b.op("GreaterOrEqual", reached, b.number(0)))
        here = b.op("And", goes_on, b.op("Equal", self._steps, count))
        return [
            b.op("Where", goes_on, reached, node),
            b.op("Add", count, b.to(goes_on, "i64")),
            b.op("Where", here, reached, path),
            b.op("Where", good, token, b.number(-1)),
            b.op("Not", goes_on),
        ]

    def _judged(
        self,
        b: Graph,
        rows: _Rows,
        children: str,
        num_children: str,
        log_weights: str,
        position: str,
        count: str,
    ) -> list[str]:
        """Try children in order; return the accepted one, -1 = none, and what is drawn where none is.

        Arguments:
            count: nodes on the path.
        """
        p = shares(b, log_weights)
        nothing = b.number(0.0, np.float64)

        def judge(c: Graph, lane: str, carried: list[str]) -> list[str]:
            p, taken = carried
            child = c.op("Gather", children, lane)
            token = c.op("Gather", rows.tokens, child)
            q = self._drafted_from(c, rows, child, token)
            number = lane if self._tree else count
            u = uniform(c, rows.params.seeds, position, ACCEPT, number)  # [1]
            share, chance = (c.op("Gather", x, token, axis=1) for x in (p, q))  # [1]
            fits = c.op("Squeeze", c.op("Less", c.op("Mul", u, chance), share), c.ints(0))
            open_ = c.op("Less", taken, c.number(0))
            left = c.op("Max", c.op("Sub", p, q), nothing)
            total = c.op("ReduceSum", left, c.ints(1), keepdims=1)
            some = c.op("Greater", total, nothing)
            rest = c.op("Div", left, c.op("Where", some, total, c.number(1.0, np.float64)))
            narrowed = c.op("And", c.op("And", open_, c.op("Not", fits)), some)
            return [
                c.op("Where", narrowed, rest, p),
                c.op("Where", c.op("And", open_, fits), child, taken),
            ]

        left, taken = b.loop(num_children, [p, b.number(-1)], judge)
        u = uniform(b, rows.params.seeds, position, REPLACE, b.number(0))
        return [taken, b.op("Squeeze", inverse_cdf(b, left, u), b.ints(0))]

    def _drafted_from(self, b: Graph, rows: _Rows, child: str, token: str) -> str:
        """Return q of a child over the target's vocabulary, [1, V] double."""
        one_hot = b.op("Cast", b.op("Equal", self._entries, token), to=TensorProto.DOUBLE)
        one_hot = b.op("Unsqueeze", one_hot, b.ints(0))
        if not self._probs:
            return one_hot
        row = b.to(b.op("Gather", "prob_rows", b.op("Add", rows.start, child)), "i64")  # [1]

        def looked_up(c: Graph) -> list[str]:
            found = c.op("Cast", c.op("Gather", "draft_probs", row), to=TensorProto.DOUBLE)
            if not self._mapped:
                return [found]
            spread = c.op("Gather", found, self._inverse, axis=1)
            return [c.op("Where", self._drafted, spread, c.number(0.0, np.float64))]

        known = b.op("Squeeze", b.op("GreaterOrEqual", row, b.number(0)), b.ints(0))
        return b.choose(known, looked_up, lambda _: [one_hot])[0]
