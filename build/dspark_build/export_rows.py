"""The front of a target's graph: rows that the device lays out, where the drafter's engine has drafted for this pass.

What `dspark_plugins.ops.scheduled_rows` is in torch, as nodes: `DSparkSchedule` and gathers. Without drafted sequences
(D = 0) every row is the host's and stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from dspark_plugins.ops.scheduled_rows import FARTHEST
from onnx import TensorProto, numpy_helper

from dspark_build.export_graph import DOMAIN, Graph, plugin_attributes

__all__ = ["RowNames", "scheduled_rows"]


@dataclass(frozen=True, slots=True)
class RowNames:
    """Values of a graph that say what its rows are; as long as nothing lays them out, its inputs."""

    tokens: str = "tokens"
    positions: str = "positions"
    slots: str = "slots"
    query_start: str = "query_start"
    logit_rows: str = "logit_rows"
    prob_rows: str = "prob_rows"
    verify_start: str = "verify_start"


def scheduled_rows(g: Graph, *, page_size: int, block_size: int) -> RowNames:
    """Add the rows of a pass, and its output `verify_len`; inputs are those of `target_bindings`."""
    starts, source = _schedule(g, block_size)
    given = RowNames()
    filled = g.op("Gather", starts, g.ints(-1))  # [1] rows of the drafted sequences
    at, last = _numbers(g, given.tokens)
    own = g.op("Less", at, filled)
    zero = _int(g, 0)
    known = g.op(
        "Concat", source, g.constant(np.array([-1], np.int32)), axis=0
    )  # something to look at for D = 0
    place = g.op("Where", own, g.op("Gather", known, g.op("Min", at, _last(g, known))), zero)
    owner = g.op("Div", place, _int(g, 1 + block_size))
    depth = g.op("Sub", place, g.op("Mul", owner, _int(g, 1 + block_size)))
    is_anchor = g.op("Equal", depth, zero)
    draft = g.op("Sub", g.op("Add", g.op("Mul", owner, _int(g, block_size)), depth), _int(g, 1))

    some = g.constant(np.zeros(1, np.int32))
    drafts = g.op("Concat", g.op("Reshape", "draft_tokens", g.ints(-1)), some, axis=0)
    anchors = g.op("Concat", "anchors", some, axis=0)
    drafted = g.op("Gather", drafts, g.op("Max", draft, zero))
    token = g.op("Where", is_anchor, g.op("Gather", anchors, owner), drafted)
    position = g.op("Add", g.op("Gather", "context_len", owner), depth)
    slot = _slot(g, owner, position, page_size)
    drawn = g.op("Greater", g.op("Gather", "temperature", owner), g.number(0.0, np.float32))
    has_q = g.op("And", g.op("Not", is_anchor), drawn)
    q_row = g.op("Where", has_q, draft, _int(g, -1))

    rest = g.op("Max", g.op("Sub", at, filled), zero)

    def laid_out(own_rows: str, name: str) -> str:
        return g.op("Where", own, own_rows, g.op("Gather", name, rest))

    logit_at, _ = _numbers(g, given.logit_rows)
    own_logits = g.op("Less", logit_at, filled)
    logit_rest = g.op("Max", g.op("Sub", logit_at, filled), zero)
    moved = g.op("Add", g.op("Gather", given.logit_rows, logit_rest), filled)
    of_logits = g.op("Gather", q_row, g.op("Min", logit_at, last))
    ends, _ = _numbers(g, given.query_start)
    begins = g.op("Gather", starts, g.op("Min", ends, _last(g, starts)))
    return RowNames(
        tokens=laid_out(token, given.tokens),
        positions=laid_out(position, given.positions),
        slots=laid_out(slot, given.slots),
        query_start=g.op("Add", given.query_start, begins),
        logit_rows=g.op("Where", own_logits, logit_at, g.op("Min", moved, last)),
        prob_rows=g.op("Where", own_logits, of_logits, g.op("Gather", given.prob_rows, logit_rest)),
        verify_start=g.op("Add", given.verify_start, begins),
    )


def _schedule(g: Graph, block_size: int) -> tuple[str, str]:
    """Add `DSparkSchedule`; return where sequences start [D+1] and what each row is [D * (1 + G)]."""
    zero = _int(g, 0)
    padding = g.op("Less", "kinds", zero)
    count = g.op("Add", g.op("Mul", g.size("kinds", 0), g.ints(block_size)), g.ints(1))
    one = numpy_helper.from_array(np.ones(1, np.float32))
    _, starts, source, _ = g.op_of(
        "DSparkSchedule",
        _calibrated(g),
        g.op("Where", padding, _int(g, -1), "num_tokens"),
        g.op("Concat", "budget", "budget", axis=0),
        g.constant(np.zeros(1, np.int32)),
        g.op(
            "ConstantOfShape", count, value=one
        ),  # what it takes is the host's to weigh: the budget is known
        outputs=["verify_len", g.fresh("starts"), g.fresh("source"), g.fresh("budgets")],
        domain=DOMAIN,
        **plugin_attributes(),
    )
    return starts, source


def _calibrated(g: Graph) -> str:
    """Return c_k [D, G] by the map of `dspark.calibration.online`; NaN where a logit is not finite."""
    numbers = g.op("Gather", "calibration", g.op("Max", "kinds", _int(g, 0)))  # [D, G, 5]
    scale, shift, a, b, d = (g.op("Gather", numbers, g.number(i), axis=2) for i in range(5))
    logits = "confidence_logits"
    wrong = g.op("Or", g.op("IsNaN", logits), g.op("IsInf", logits))
    x = g.op("Where", wrong, g.number(0.0, np.float32), logits)
    x = g.op("Add", g.op("Mul", x, scale), shift)
    x = g.op("Clip", x, g.number(-FARTHEST, np.float32), g.number(FARTHEST, np.float32))
    tail = g.op("Add", g.number(1.0, np.float32), g.op("Exp", g.op("Neg", g.op("Abs", x))))
    high = g.op("Add", g.op("Relu", x), g.op("Log", tail))  # softplus(x)
    low = g.op("Sub", high, x)
    score = g.op("Sub", g.op("Add", g.op("Mul", b, high), d), g.op("Mul", a, low))
    return g.op("Where", wrong, g.number(np.nan, np.float32), g.op("Sigmoid", score))


def _slot(g: Graph, owner: str, position: str, page_size: int) -> str:
    """Return the cache slot of a position [T] of each row's sequence."""
    page = g.op("Div", position, _int(g, page_size))
    width = g.to(g.size("page_table", 1), "i32")
    pages = g.op("Reshape", "page_table", g.ints(-1))
    found = g.op("Gather", pages, g.op("Add", g.op("Mul", owner, width), page))
    inside = g.op("Sub", position, g.op("Mul", page, _int(g, page_size)))
    return g.op("Add", g.op("Mul", found, _int(g, page_size)), inside)


def _numbers(g: Graph, name: str) -> tuple[str, str]:
    """Return 0, 1, ... for each entry of a value [n], and the last of these numbers, both int32."""
    end = g.op("Squeeze", g.size(name, 0), g.ints(0))
    numbers = g.op("Cast", g.op("Range", g.number(0), end, g.number(1)), to=TensorProto.INT32)
    return numbers, _last(g, name)


def _last(g: Graph, name: str) -> str:
    """Return the index of the last entry [1] int32."""
    return g.op("Sub", g.to(g.size(name, 0), "i32"), g.constant(np.ones(1, np.int32)))


def _int(g: Graph, value: int) -> str:
    return g.number(value, np.int32)
