"""What an engine may use, which requests it can never serve, and how a request becomes a sequence."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

import numpy as np

from dspark.engine.sequence import Sequence
from dspark.errors import RequestError
from dspark.models.config import TargetConfig
from dspark.models.tokenizer import Tokenizer
from dspark.request import Request, SpecMetrics
from dspark.sampling.transforms import SampledRule, TokenSampler
from dspark.text.assembler import TextAssembler

__all__ = ["EngineLimits", "check_request", "make_sequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What one engine may use. `max_step_tokens` bounds prompt rows of a step; drafts come on top."""

    max_batch_size: int
    max_context_len: int  # tokens of one sequence, prompt and answer
    max_step_tokens: int
    num_pages: int
    page_size: int


def check_request(request: Request, *, vocab_size: int, limits: EngineLimits, has_tokenizer: bool) -> None:
    """Refuse what can never be served.

    Raises:
        RequestError: naming the field, the value and what is allowed.
    """
    params = request.params
    _check_tokens("input_ids", request.prompt_ids, vocab_size)
    prompt_len, context = len(request.prompt_ids), limits.max_context_len
    if prompt_len == 0:
        raise RequestError("input_ids", [], "at least one prompt token")
    if prompt_len >= context:
        raise RequestError("input_ids", f"{prompt_len} tokens", f"prompts of at most {context - 1} tokens")
    if params.max_tokens > context - prompt_len:
        allowed = f"1 to {context - prompt_len} (context {context}, prompt {prompt_len})"
        raise RequestError("max_tokens", params.max_tokens, allowed)
    room = limits.num_pages * limits.page_size
    if prompt_len + params.max_tokens > room:
        allowed = f"prompt and answer of at most {room} tokens, the whole cache; start with more cache bytes"
        raise RequestError("max_tokens", params.max_tokens, allowed)
    if params.end_id is not None and params.end_id != -1:
        _check_tokens("end_id", (params.end_id,), vocab_size)
    _check_tokens("stop_token_ids", params.stop_token_ids, vocab_size)
    for word in params.bad_words_ids:
        _check_tokens("bad_words", word, vocab_size)
    if params.guided_decoding_guide_type is not None and request.grammar is None:
        raise RequestError(
            "guided_decoding_guide_type",
            params.guided_decoding_guide_type,
            "a guide with its grammar: compile it with `sampling.grammar.GrammarCompiler`",
        )
    if params.stop_words and not has_tokenizer:
        raise RequestError("stop_words", list(params.stop_words), "none, since no tokenizer is loaded")


def make_sequence(
    request: Request,
    *,
    sequence_id: int,
    root: int,
    limits: EngineLimits,
    config: TargetConfig,
    tokenizer: Tokenizer | None,
    rule: SampledRule,
) -> Sequence:
    """Return a checked request as a sequence that holds no page yet.

    Arguments:
        sequence_id: also its place in the order of arrival.
        root: where its page chain starts.
        tokenizer: None serves token ids only.
        rule: how sampled drafts are judged; see `TokenSampler`.
    """
    params = request.params
    seed = params.seed if params.seed is not None else secrets.randbits(64)
    eos_ids = tuple(sorted({*config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}))
    assembler = None
    if tokenizer is not None:
        assembler = TextAssembler.for_tokenizer(tokenizer, params.stop_words, min_tokens=params.min_tokens)
    max_pages = -(-limits.max_context_len // limits.page_size)
    return Sequence(
        sequence_id=sequence_id,
        request=request,
        seed=seed,
        sampler=TokenSampler(
            params,
            seed=seed,
            prompt_ids=request.prompt_ids,
            vocab_size=config.vocab_size,
            eos_ids=eos_ids,
            rule=rule,
            grammar=request.grammar,
        ),
        assembler=assembler,
        token_ids=list(request.prompt_ids),
        prompt_len=len(request.prompt_ids),
        arrival=sequence_id,
        page_row=np.full(max_pages, -1, np.int32),
        root=root,
        node=root,
        metrics=SpecMetrics(arrival_time_ns=request.arrival_time_ns or time.time_ns(), seed=seed),
    )


def _check_tokens(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise RequestError(field, bad, f"token ids from 0 to {vocab_size - 1}")
