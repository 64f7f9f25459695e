"""Reference bodies of both attentions: ONNX functions that any runtime can run, sequence after sequence."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from dspark_build.export_graph import Graph, body_function

__all__ = ["block_attention_function", "paged_attention_function"]

_PAGED_INPUTS = (
    *("q", "k", "v", "kv_cache", "cos", "sin", "page_table", "query_start", "context_len"),
    *("slots", "positions", "ancestors"),
)
_BLOCK_INPUTS = (
    *("q", "k", "v", "kv_cache", "cos", "sin", "new_k", "new_v", "new_cos", "new_sin", "new_slots"),
    *("page_table", "context_len", "anchor_positions"),
)
_ATTRIBUTES = ("page_size", "scale", "window")


def paged_attention_function() -> onnx.FunctionProto:
    """Return the body of `DSparkPagedAttention` (docs/tensorrt.md)."""
    g = Graph()
    page_size, scale, window = (
        g.attribute("page_size", "int"),
        g.attribute("scale", "float"),
        g.attribute("window", "int"),
    )
    ends = g.op("Cast", "query_start", to=TensorProto.INT64)
    real = g.take(ends, g.ints(-1), g.ints(np.iinfo(np.int64).max))  # [1] rows that are no padding
    q, k, v, slots, positions, ancestors, cos, sin = (
        g.take(x, g.ints(0), real) for x in ("q", "k", "v", "slots", "positions", "ancestors", "cos", "sin")
    )
    slots, positions = g.to(slots, "i64"), g.to(positions, "i64")
    q, k = (g.op("CastLike", _rotated(g, x, cos, sin), "v") for x in (q, k))
    cache = _written(g, slots, k, v)
    # A column of zeros lets chains, which have no words, be looked up like trees; the answer is left out.
    words = g.size("ancestors", 1)
    column = g.op("Expand", g.constant(np.zeros((1, 1), np.int32)), g.op("Concat", real, g.ints(1), axis=0))
    masks = g.op("Cast", g.op("Concat", ancestors, column, axis=1), to=TensorProto.UINT32)
    chain = g.op("Equal", words, g.ints(0))
    qf, kv = g.to(q, "fp32"), g.to(cache, "fp32")
    context, table = g.to("context_len", "i64"), g.to("page_table", "i64")
    num_heads, dim = g.size("q", 1), g.size("q", 2)
    none = g.op("ConstantOfShape", g.op("Concat", g.ints(0), num_heads, dim, axis=0))

    def sequence(b: Graph, index: str, carried: list[str]) -> list[str]:
        at = b.op("Unsqueeze", index, b.ints(0))
        after = b.op("Add", at, b.ints(1))
        start, end = b.op("Gather", ends, at), b.op("Gather", ends, after)
        length = b.op("Gather", context, index)
        cached, old = _context(b, length, b.op("Gather", table, index), page_size)
        rows = b.op("Gather", kv, b.op("Concat", old, b.take(slots, start, end), axis=0))
        n = b.op("Sub", end, start)
        seen = _visible(b, start, end, n, cached)
        flat = _attended(b, b.take(qf, start, end), rows, seen, scale)
        return [b.op("Concat", carried[0], flat, axis=0)]

    def _visible(b: Graph, start: str, end: str, n: str, cached: str) -> str:
        """Return [n, C + n]: the context, then the own rows that the masks name, within the window."""
        own = b.op("Range", b.number(0), b.op("Squeeze", n, b.ints(0)), b.number(1))  # [n]
        behind = b.op("LessOrEqual", own, b.op("Unsqueeze", own, b.ints(1)))
        word = b.op("Min", b.op("Div", own, b.number(32)), b.op("Squeeze", words, b.ints(0)))
        shift = b.op("Cast", b.op("Mod", own, b.number(32)), to=TensorProto.UINT32)
        chosen = b.op("Gather", b.take(masks, start, end), word, axis=1)  # [n, n]
        bits = b.op("BitShift", chosen, b.op("Expand", shift, b.op("Shape", chosen)), direction="RIGHT")
        named = b.op("Cast", b.op("BitwiseAnd", bits, b.number(1, np.uint32)), to=TensorProto.BOOL)
        inside = b.op("Or", b.op("And", chain, behind), b.op("And", b.op("Not", chain), named))
        shape = b.op("Concat", n, b.op("Shape", cached), axis=0)
        before = b.op("Expand", b.constant(np.array([[True]])), shape)
        its = b.take(positions, start, end)
        near = b.op(
            "Greater",
            b.op("Concat", cached, its, axis=0),
            b.op("Sub", b.op("Unsqueeze", its, b.ints(1)), window),
        )
        all_near = b.op("Or", near, b.op("Equal", window, b.number(0)))
        return b.op("And", b.op("Concat", before, inside, axis=1), all_near)

    num_sequences = g.op("Squeeze", g.size("context_len", 0), g.ints(0))
    (attended,) = g.loop(num_sequences, [none], sequence)
    # Padding rows come out as zeros.
    missing = g.op("Sub", g.size("q", 0), real)
    padding = g.op("ConstantOfShape", g.op("Concat", missing, num_heads, dim, axis=0))
    g.op("CastLike", g.op("Concat", attended, padding, axis=0), "v", name="attended")
    return body_function(
        "DSparkPagedAttention",
        g,
        inputs=_PAGED_INPUTS,
        outputs=["attended", "kv_cache_out"],
        attributes=_ATTRIBUTES,
    )


def block_attention_function() -> onnx.FunctionProto:
    """Return the body of `DSparkBlockAttention` (docs/tensorrt.md)."""
    g = Graph()
    page_size, scale, window = (
        g.attribute("page_size", "int"),
        g.attribute("scale", "float"),
        g.attribute("window", "int"),
    )
    # New rows first: what they write counts as context. Padding has a negative slot.
    wanted = g.op("GreaterOrEqual", "new_slots", g.constant(np.array(0, np.int32)))
    real = g.op("Squeeze", g.op("NonZero", wanted), g.ints(0))
    new_k, new_v, slots = (g.op("Gather", x, real) for x in ("new_k", "new_v", "new_slots"))
    new_cos, new_sin = (g.op("Gather", x, real) for x in ("new_cos", "new_sin"))
    new_k = g.op("CastLike", _rotated(g, new_k, new_cos, new_sin), "v")
    kv = g.to(_written(g, g.to(slots, "i64"), new_k, new_v), "fp32")
    q = _rotated(g, "q", "cos", "sin")
    k = g.to(g.op("CastLike", _rotated(g, "k", "cos", "sin"), "v"), "fp32")
    both = g.op(
        "Concat",
        g.op("Unsqueeze", k, g.ints(2)),
        g.op("Unsqueeze", g.to("v", "fp32"), g.ints(2)),
        axis=2,
    )  # [R, G, 2, Hkv, D]
    context, table = g.to("context_len", "i64"), g.to("page_table", "i64")
    anchors = g.to("anchor_positions", "i64")
    block = g.op("Range", g.number(0), g.op("Squeeze", g.size("q", 1), g.ints(0)), g.number(1))  # [G]
    shape = g.op("Concat", g.ints(0), g.op("Shape", "q", start=1), axis=0)

    def sequence(b: Graph, index: str, carried: list[str]) -> list[str]:
        cached, old = _context(b, b.op("Gather", context, index), b.op("Gather", table, index), page_size)
        own = b.op("Gather", both, index)
        rows = b.op("Concat", b.op("Gather", kv, old), own, axis=0)  # [C + G, 2, Hkv, D]
        at = b.op("Unsqueeze", b.op("Add", block, b.op("Gather", anchors, index)), b.ints(1))
        near = b.op("Greater", cached, b.op("Sub", at, window))  # [G, C]
        near = b.op("Or", near, b.op("Equal", window, b.number(0)))
        sides = b.op("Concat", b.op("Shape", block), b.op("Shape", block), axis=0)
        seen = b.op("Concat", near, b.op("Expand", b.constant(np.array([[True]])), sides), axis=1)
        found = _attended(b, b.op("Gather", q, index), rows, seen, scale)
        return [b.op("Concat", carried[0], b.op("Unsqueeze", found, b.ints(0)), axis=0)]

    num_sequences = g.op("Squeeze", g.size("q", 0), g.ints(0))
    (attended,) = g.loop(num_sequences, [g.op("ConstantOfShape", shape)], sequence)
    g.op("CastLike", attended, "v", name="attended")
    return body_function(
        "DSparkBlockAttention",
        g,
        inputs=_BLOCK_INPUTS,
        outputs=["attended", "kv_cache_out"],
        attributes=_ATTRIBUTES,
    )


def _written(g: Graph, slots: str, k: str, v: str) -> str:
    """Return the cache with keys and values [n, Hkv, D] in slots [n] int64, as `kv_cache_out`."""
    both = g.op("Concat", g.op("Unsqueeze", k, g.ints(1)), g.op("Unsqueeze", v, g.ints(1)), axis=1)
    return g.op("ScatterND", "kv_cache", g.op("Unsqueeze", slots, g.ints(-1)), both, name="kv_cache_out")


def _context(b: Graph, length: str, pages: str, page_size: str) -> tuple[str, str]:
    """Return positions and cache slots [C] of a sequence's context of [] int64 rows in pages [P]."""
    cached = b.op("Range", b.number(0), length, b.number(1))
    of_row = b.op("Gather", pages, b.op("Div", cached, page_size))
    return cached, b.op("Add", b.op("Mul", of_row, page_size), b.op("Mod", cached, page_size))


def _attended(b: Graph, q: str, rows: str, seen: str, scale: str) -> str:
    """Return [n, Hq, D] of queries [n, Hq, D] over keys and values [L, 2, Hkv, D] that they see [n, L]; all fp32."""
    keys, values = (
        b.op("Transpose", b.op("Gather", rows, b.number(which), axis=1), perm=[1, 0, 2]) for which in (0, 1)
    )  # [Hkv, L, D]
    n, num_heads, dim = (b.size(q, axis) for axis in (0, 1, 2))
    num_kv = b.size(rows, 2)
    grouped = b.op("Concat", n, num_kv, b.op("Div", num_heads, num_kv), dim, axis=0)
    heads = b.op("Reshape", q, grouped, allowzero=1)
    queries = b.op("Transpose", heads, perm=[2, 1, 0, 3])  # [group, Hkv, n, D]
    scores = b.op("Mul", b.op("MatMul", queries, b.op("Transpose", keys, perm=[0, 2, 1])), scale)
    masked = b.op("Where", seen, scores, b.constant(np.array(-np.inf, np.float32)))
    mixed = b.op("MatMul", b.op("Softmax", masked, axis=-1), values)
    flat = b.op("Concat", n, num_heads, dim, axis=0)
    return b.op("Reshape", b.op("Transpose", mixed, perm=[2, 1, 0, 3]), flat, allowzero=1)


def _rotated(g: Graph, x: str, cos: str, sin: str) -> str:
    """Return heads [..., H, D] turned by tables [..., D/2], fp32; element j pairs with element j + D/2."""
    first, second = g.op_of("Split", g.to(x, "fp32"), outputs=2, axis=-1, num_outputs=2)
    c, s = g.op("Unsqueeze", cos, g.ints(-2)), g.op("Unsqueeze", sin, g.ints(-2))
    left = g.op("Sub", g.op("Mul", first, c), g.op("Mul", second, s))
    right = g.op("Add", g.op("Mul", second, c), g.op("Mul", first, s))
    return g.op("Concat", left, right, axis=-1)
