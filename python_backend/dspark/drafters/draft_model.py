"""A smaller language model as drafter: which models can draft for a target.

Verification compares token ids, so both models must mean the same by them: vocabularies of one size, and the same piece
behind every id that both tokenizers know.
"""

from __future__ import annotations

from dspark.errors import CheckpointError
from dspark.models.config import TargetConfig
from dspark.models.loading import TargetCheckpoint, load_target
from dspark.models.tokenizer import Tokenizer

__all__ = ["check_draft_model", "load_draft_checkpoint"]


def load_draft_checkpoint(
    spec: str, *, target: TargetConfig, tokenizer: Tokenizer | None = None
) -> TargetCheckpoint:
    """Open a draft model and check it against the target; weights are read later.

    Arguments:
        spec: a Hugging Face folder or a .gguf file.
        tokenizer: the target's, None where it has none: then sizes alone are compared.

    Raises:
        CheckpointError: it cannot be served, or not with this target.
    """
    checkpoint = load_target(spec)
    check_draft_model(checkpoint, target=target, tokenizer=tokenizer, where=spec)
    return checkpoint


def check_draft_model(
    checkpoint: TargetCheckpoint, *, target: TargetConfig, tokenizer: Tokenizer | None, where: str
) -> None:
    """Refuse a model whose token ids are not the target's.

    Raises:
        CheckpointError: naming what differs, with both values.
    """
    if checkpoint.config.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"{where}: vocab_size: the draft model has {checkpoint.config.vocab_size}, the target {target.vocab_size}; "
            "a draft model must have the target's vocabulary"
        )
    if tokenizer is None or checkpoint.tokenizer is None:
        return
    ours, theirs = checkpoint.tokenizer, tokenizer
    for token in range(min(ours.vocab_size, theirs.vocab_size)):
        pieces = ours.token_bytes(token), theirs.token_bytes(token)
        if pieces[0] != pieces[1] and b"" not in pieces:  # an id that one of them leaves out is never written
            raise CheckpointError(
                f"{where}: token {token}: the draft model's is {pieces[0]!r}, the target's {pieces[1]!r}; a draft "
                "model must have the target's tokenizer"
            )
