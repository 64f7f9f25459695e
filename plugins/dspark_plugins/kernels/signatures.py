"""The run-time arguments of every kernel, in order, with their types; a compiled kernel takes them as they stand here.

A type is a scalar's (i32, fp32), a pointer's (*i32, *i64, *fp32) or the name of one of the variant's own `dtypes`
behind a star (*io, *input, *weight). Pointers are aligned to 16 bytes. No torch, no Triton language.
"""

from __future__ import annotations

from dspark_plugins.kernels.plans import Variant

__all__ = ["MODULES", "SIGNATURES", "arguments_of"]

_SAMPLING = "temperature:*fp32 top_k:*i32 top_p:*fp32 min_p:*fp32"

_SIGNATURES = {
    "attention_kernel": (
        "q:*input k:*input v:*io kv_cache:*io cos:*fp32 sin:*fp32 page_table:*i32 query_start:*i32 "
        "context_len:*i32 slots:*i32 positions:*i32 ancestors:*i32 out:*io partial_acc:*fp32 partial_ml:*fp32 "
        "num_sequences:i32 num_rows_total:i32 max_pages:i32 q_stride:i32 k_stride:i32 v_stride:i32 "
        "ancestor_words:i32 page_size:i32 scale:fp32 window:i32 split_len:i32"
    ),
    "merge_splits_kernel": ("partial_acc:*fp32 partial_ml:*fp32 out:*io num_rows_total:i32 num_splits:i32"),
    "write_rows_kernel": (
        "k:*input v:*io kv_cache:*io cos:*fp32 sin:*fp32 slots:*i32 num_rows:i32 k_stride:i32 v_stride:i32"
    ),
    "block_sample_kernel": (
        f"base_logits:*io hidden:*weight anchors:*i32 num_drafts:*i32 positions:*i32 seeds:*i64 {_SAMPLING} "
        "coupled:*i32 markov_in:*weight markov_out:*weight mix_weight:*weight mix_bias:*weight "
        "confidence_weight:*weight confidence_bias:*fp32 greedy_confidence:*fp32 draft_to_target:*i32 "
        "previous_rows:*i32 tokens:*i32 "
        "num_tokens:*i32 draft_probs:*fp32 confidence_logits:*fp32 projected:*fp32 mixed:*fp32 state:*fp32 "
        "tile_values:*fp32 tile_entries:*i32 limits:*fp32 bounds:*i32 barrier:*i32 num_blocks:i32 block_size:i32 "
        "vocab_size:i32 hidden_size:i32 num_tiles:i32 first_phase:i32 last_phase:i32"
    ),
    "row_limits_kernel": (
        f"logits:*io query_start:*i32 {_SAMPLING} limits:*fp32 bounds:*i32 "
        "num_sequences:i32 vocab_size:i32 logits_stride:i32"
    ),
    "chain_weights_kernel": (
        "logits:*io tokens:*i32 query_start:*i32 draft_probs:*fp32 prob_rows:*i32 target_to_draft:*i32 "
        "temperature:*fp32 coupled:*i32 limits:*fp32 bounds:*i32 weights:*fp32 num_sequences:i32 vocab_size:i32 "
        "draft_vocab_size:i32 logits_stride:i32 max_depth:i32"
    ),
    "schedule_kernel": (
        "confidence:*fp32 num_drafts:*i32 budgets:*i32 step:*i32 seconds:*fp32 verify_len:*i32 query_start:*i32 "
        "row_source:*i32 new_budgets:*i32 survival:*fp32 ordered:*fp32 rank_of:*i32 num_sequences:i32 block_size:i32"
    ),
    "walk_kernel": (
        "logits:*io tokens:*i32 query_start:*i32 parents:*i32 draft_probs:*fp32 prob_rows:*i32 target_to_draft:*i32 "
        "positions:*i32 seeds:*i64 temperature:*fp32 coupled:*i32 limits:*fp32 bounds:*i32 weights:*fp32 "
        "left_of_all:*fp32 accepted:*i32 path:*i32 next_token:*i32 vocab_size:i32 draft_vocab_size:i32 "
        "logits_stride:i32 max_depth:i32"
    ),
}

SIGNATURES: dict[str, tuple[tuple[str, str], ...]] = {
    kernel: tuple((name, kind) for name, _, kind in (part.partition(":") for part in text.split()))
    for kernel, text in _SIGNATURES.items()
}

MODULES = {  # where each kernel's device code is
    "attention_kernel": "attention",
    "merge_splits_kernel": "attention",
    "write_rows_kernel": "attention",
    "block_sample_kernel": "block_sample",
    "row_limits_kernel": "verify",
    "chain_weights_kernel": "verify",
    "schedule_kernel": "schedule",
    "walk_kernel": "verify",
}


def arguments_of(variant: Variant) -> tuple[tuple[str, str], ...]:
    """Return (name, type) of every run-time argument, with the variant's own dtypes filled in."""
    own = {f"*{name}": f"*{dtype}" for name, dtype in variant.dtypes.items()}
    return tuple((name, own.get(kind, kind)) for name, kind in SIGNATURES[variant.kernel])
