"""The target model as one ONNX graph over a ragged batch (design.md, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
from dspark.executors.tensorrt_bindings import (
    VERIFY_DEPTH,
    Precision,
    VerifyShape,
    head_precision,
    target_bindings,
)
from dspark.models.config import TargetConfig, WeightSource
from onnx import TensorProto

from dspark_build.export_bodies import paged_attention_function
from dspark_build.export_decoder import DecoderGraph
from dspark_build.export_graph import DOMAIN, finished_model, plugin_attributes
from dspark_build.export_rows import RowNames, scheduled_rows
from dspark_build.export_schedule import schedule_function
from dspark_build.export_verify import verify_function, verify_inputs
from dspark_build.export_weights import WeightFile

__all__ = ["target_model"]


def _attention(
    t: DecoderGraph, x: str, layer: int, page_size: int, tables: tuple[str, str], rows: RowNames
) -> str:
    """Return [T, Hq * D] of one layer over normed rows."""
    g, decoder = t.g, t.decoder
    q, k, v = (t.heads(x, layer, part, t.matrix(f"layers.{layer}.self_attn.{part}_proj")) for part in "qkv")
    cache = f"kv_cache.{layer}"
    attended, _ = g.op_of(
        "DSparkPagedAttention",
        *(q, k, v, cache, *tables),
        *("page_table", rows.query_start, "context_len", rows.slots, rows.positions, "ancestors"),
        outputs=[g.fresh("attended"), f"{cache}.out"],
        domain=DOMAIN,
        page_size=page_size,
        scale=decoder.head_dim**-0.5,
        window=0,
        **plugin_attributes(),
    )
    return g.op("Reshape", attended, g.ints(-1, decoder.num_heads * decoder.head_dim))


def _ends(t: DecoderGraph, hidden: str, table: str, logit_rows: str, *, tied: bool) -> None:
    """Add logits, arg-max and finiteness of the wanted rows."""
    g, kind = t.g, head_precision(t.precision)
    wanted = t.normed(g.op("Gather", hidden, logit_rows), "norm")
    head = table if tied else t.matrix("lm_head", kind)
    logits = g.op("Cast", g.linear(g.to(wanted, kind), head), name="logits", to=TensorProto.FLOAT)
    best = g.op("ArgMax", logits, axis=-1, keepdims=0)
    g.op("Cast", best, name="argmax", to=TensorProto.INT32)
    wrong = g.to(g.op("Or", g.op("IsNaN", logits), g.op("IsInf", logits)), "i32")
    worst = g.op("ReduceMax", wrong, g.ints(-1), keepdims=0)
    g.op("Sub", g.constant(np.array(1, np.int32)), worst, name="finite")


def _verify(
    t: DecoderGraph,
    shape: VerifyShape,
    vocab_size: int,
    draft_to_target: npt.NDArray[np.int32] | None,
    rows: RowNames,
) -> None:
    """Add the verification of chains over the wanted rows."""
    g, drafts = t.g, shape.block_size > 0
    given = {"tokens": g.op("Gather", rows.tokens, rows.logit_rows), "query_start": rows.verify_start}
    given |= {"positions": "first_positions", "prob_rows": rows.prob_rows}
    if shape.mapped:
        assert draft_to_target is not None, "a reduced draft vocabulary has a map"
        entries = np.full(vocab_size, -1, np.int32)
        entries[draft_to_target] = np.arange(len(draft_to_target), dtype=np.int32)
        given["target_to_draft"] = t.file.add("target_to_draft", entries, TensorProto.INT32)
    names = verify_inputs(tree=False, probs=drafts, mapped=shape.mapped)
    g.op_of(
        "DSparkVerify",
        *(given.get(name, name) for name in names),
        outputs=["accepted", "path", "next_token"],
        domain=DOMAIN,
        max_depth=VERIFY_DEPTH,
        tree=0,
        probs=int(drafts),
        mapped=int(shape.mapped),
        **plugin_attributes(),
    )


def target_model(
    config: TargetConfig,
    weights: WeightSource,
    file: WeightFile,
    *,
    precision: Precision,
    page_size: int,
    feature_layer_ids: Sequence[int] = (),
    verify: VerifyShape | None = None,
    draft_to_target: npt.NDArray[np.int32] | None = None,
) -> onnx.ModelProto:
    """Return the graph of the target; its weights are in `file`.

    Arguments:
        feature_layer_ids: layers whose outputs are given back, -1 = the embedding output.
        verify: what it verifies; None = it gives logits only.
        draft_to_target: [Vd] target ids of a reduced draft vocabulary, None for the full one.
    """
    t = DecoderGraph(config.decoder, weights, file, precision)
    g = t.g
    table = t.matrix("embed_tokens", head_precision(precision))
    rows, functions = RowNames(), [paged_attention_function()]
    if verify is not None and verify.rated:
        rows = scheduled_rows(g, page_size=page_size, block_size=verify.block_size)
        functions.append(schedule_function())
    hidden = g.to(g.to(g.op("Gather", table, rows.tokens), precision), "fp32")
    taken = {-1: hidden}
    tables = t.tables(rows.positions)
    for layer in range(config.decoder.num_layers):
        normed = g.to(t.normed(hidden, f"layers.{layer}.input_layernorm"), precision)
        hidden = t.behind_attention(hidden, _attention(t, normed, layer, page_size, tables, rows), layer)
        taken[layer] = hidden
    if feature_layer_ids:
        g.op("Concat", *(taken[i] for i in feature_layer_ids), name="features", axis=1)
    _ends(t, hidden, table, rows.logit_rows, tied=config.tie_word_embeddings)
    if verify is not None:
        _verify(t, verify, config.vocab_size, draft_to_target, rows)
        functions.append(verify_function(tree=False, probs=verify.block_size > 0, mapped=verify.mapped))
    layers = tuple(feature_layer_ids)
    bindings = target_bindings(config, precision=precision, feature_layer_ids=layers, verify=verify)
    return finished_model(g, "target", bindings, file.tensors, functions)
