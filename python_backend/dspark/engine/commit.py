"""The commit rules: what of a verdict becomes part of the answer, and what ends it.

Tokens are taken one by one, so that a stop inside an accepted run ends the answer right there; whatever was accepted
behind it is never seen by anyone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dspark.engine.sequence import Sequence
from dspark.errors import NonFiniteError
from dspark.sampling.verification import Verdict

__all__ = ["append_tokens", "non_finite_error", "verified_rows"]


def verified_rows(finite: npt.NDArray[np.bool_]) -> int:
    """Return how many leading rows may be used: those before the first that is not finite."""
    return len(finite) if finite.all() else int(np.argmin(finite))


def non_finite_error(position: int) -> NonFiniteError:
    return NonFiniteError(
        f"the target gave NaN or infinite logits at position {position}; the request ends here, others go on"
    )


def append_tokens(sequence: Sequence, verdict: Verdict, *, max_context_len: int) -> tuple[int, str | None]:
    """Append a verdict's tokens up to the first one that ends the answer.

    Returns:
        How many tokens were appended, and the text that may leave now (None without a tokenizer).

    An end token belongs to the token ids but not to the text. A stop string ends the answer at the token that
    completes it.
    """
    params = sequence.request.params
    end_ids = sequence.sampler.end_ids
    committed, text = 0, ""
    for token in verdict.token_ids:
        sequence.token_ids.append(token)
        committed += 1
        if token in end_ids:
            sequence.finish_reason = "stop"
        elif sequence.assembler is not None:
            delta, stopped = sequence.assembler.push(token)
            text += delta
            if stopped:
                sequence.finish_reason = "stop"
        if sequence.finish_reason is None and (
            sequence.output_len >= params.max_tokens or len(sequence.token_ids) >= max_context_len
        ):
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            break
    sequence.sampler.commit(sequence.token_ids[-committed:])
    return committed, (text if sequence.assembler is not None else None)
