"""Reference body of `DSparkSchedule`: what `dspark_plugins.reference.schedule` is in torch."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from dspark_build.export_graph import Graph, body_function

__all__ = ["schedule_function"]


def schedule_function() -> onnx.FunctionProto:
    """Return the body (docs/tensorrt.md)."""
    g = Graph()
    num_sequences, block_size = g.size("confidence", 0), g.size("confidence", 1)
    rows, width = (g.op("Squeeze", x, g.ints(0)) for x in (num_sequences, block_size))
    survival = _survival(g, rows, width)
    # Likelier first, position-major index first among equals: TopK keeps the lower index in front.
    flat = g.op("Reshape", g.op("Transpose", survival, perm=[1, 0]), g.ints(-1))
    total = g.size(flat, 0)
    ordered, order = g.op_of("TopK", flat, total, outputs=2, axis=0)
    alive = g.op("Greater", ordered, g.number(0, np.float32))
    slot = g.op("Mod", g.to("step", "i64"), g.ints(2))  # [1]
    budget = g.op("Max", g.to(g.op("Gather", "budgets", slot), "i64"), g.ints(0))
    rank = g.op("Range", g.number(0), g.op("Squeeze", total, g.ints(0)), g.number(1))
    taken = g.to(g.op("And", alive, g.op("Less", rank, budget)), "i32")
    none = g.to(g.op("ConstantOfShape", num_sequences), "i32")
    divisor = g.op("Max", num_sequences, g.ints(1))  # without sequences there is nothing to divide
    lengths = g.op(
        "ScatterElements", none, g.op("Mod", order, divisor), taken, name="verify_len", reduction="add"
    )
    _next_budget(g, ordered, alive, slot, rows)
    _rows(g, lengths, num_sequences, block_size)
    return body_function(
        "DSparkSchedule",
        g,
        inputs=("confidence", "num_drafts", "budgets", "step", "seconds"),
        outputs=("verify_len", "query_start", "row_source", "new_budgets"),
        attributes=(),
    )


def _survival(g: Graph, rows: str, width: str) -> str:
    """Return [R, G] running products from left to right, 0 from the first unusable confidence on."""
    position = g.op("Range", g.number(0), width, g.number(1))
    wanted = g.op("Less", position, g.op("Unsqueeze", g.to("num_drafts", "i64"), g.ints(1)))
    zero = g.number(0, np.float32)
    usable = g.op("And", wanted, g.op("Greater", "confidence", zero))  # NaN is not greater
    c = g.op("Where", usable, "confidence", zero)
    count = g.op("Unsqueeze", rows, g.ints(0))
    first = g.op("Expand", g.constant(np.ones((1, 1), np.float32)), g.op("Concat", count, g.ints(1), axis=0))
    none = g.op("ConstantOfShape", g.op("Concat", count, g.ints(0), axis=0))

    def step(b: Graph, k: str, carried: list[str]) -> list[str]:
        last, found = carried
        column = b.op("Gather", c, b.op("Unsqueeze", k, b.ints(0)), axis=1)
        last = b.op("Mul", last, column)
        return [last, b.op("Concat", found, last, axis=1)]

    return g.loop(width, [first, none], step)[1]


def _next_budget(g: Graph, ordered: str, alive: str, slot: str, rows: str) -> None:
    """Add the double buffer with the number of drafts whose expected tokens a second are the most."""
    zero = g.constant(np.zeros(1))
    gained = g.op("CumSum", g.op("Cast", ordered, to=TensorProto.DOUBLE), g.number(0))
    tokens = g.op("Add", g.op("Concat", zero, gained, axis=0), g.op("Cast", rows, to=TensorProto.DOUBLE))
    theta = g.op("Div", tokens, g.op("Cast", "seconds", to=TensorProto.DOUBLE))
    possible = g.op("Concat", g.constant(np.array([True])), alive, axis=0)
    best = g.op("ArgMax", g.op("Where", possible, theta, g.number(-1.0, np.float64)), axis=0, keepdims=1)
    g.op("ScatterElements", "budgets", slot, g.to(best, "i32"), name="new_budgets")


def _rows(g: Graph, lengths: str, num_sequences: str, block_size: str) -> None:
    """Add where sequences start and what each row of the pass is."""
    padding = g.op("Less", "num_drafts", g.constant(np.array(0, np.int32)))  # sequences without rows
    counts = g.op("Where", padding, g.number(0), g.op("Add", g.to(lengths, "i64"), g.number(1)))
    start = g.op("Concat", g.ints(0), g.op("CumSum", counts, g.number(0)), axis=0)
    g.op("Cast", start, name="query_start", to=TensorProto.INT32)
    wide = g.op("Add", block_size, g.ints(1))
    column = g.op("Range", g.number(0), g.op("Squeeze", wide, g.ints(0)), g.number(1))
    kept = g.op("Less", column, g.op("Unsqueeze", counts, g.ints(1)))  # [R, 1 + G]
    begins = g.take(start, g.ints(0), g.ints(-1))
    at = g.op("Add", g.op("Unsqueeze", begins, g.ints(1)), column)
    source = g.op("Squeeze", g.op("NonZero", g.op("Reshape", kept, g.ints(-1))), g.ints(0))
    places = g.op("Gather", g.op("Reshape", at, g.ints(-1)), source)
    empty = g.op("Expand", g.constant(np.array([-1], np.int32)), g.op("Mul", num_sequences, wide))
    g.op("ScatterElements", empty, places, g.to(source, "i32"), name="row_source")
