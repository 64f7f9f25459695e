"""Grammars that an answer must follow: JSON, a JSON schema, a regular expression. Only here is llguidance imported.

A compiler is made behind a model's start, library and vocabulary with it: with 49,000 tokens they take 0.7 s and 20 MB,
which the first guided request would otherwise wait for, and the server's memory grow by in one step.

A grammar says which tokens may come next, for drafted and for committed text alike, so that drafts follow it as the
target does. Walking a draft moves the matcher and rolls it back; masks are kept until the next commit, since drafting,
verification and the stop rule ask for the same ones.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from dspark.errors import RequestError
from dspark.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

__all__ = ["MOST_GUIDE_BYTES", "GrammarCompiler", "TokenGrammar", "try_guide"]

MOST_GUIDE_BYTES: Final = 64 << 10  # what a guide costs grows with its length, even where it is simple

Mask = npt.NDArray[np.bool_]
# One way to write a value. Free white space lets a model that has lost its way write blanks for ever, and forced
# separators are drafts that are always accepted.
_JSON_OPTIONS: Final[dict[str, object]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


class GrammarCompiler:
    """Compiles guides for one tokenizer. Without the library every guide is refused.

    Arguments:
        tokenizer: of the target.
        vocab_size: V of the target; ids the tokenizer does not know are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        try:
            self._vocabulary: llguidance.LLTokenizer | None = _vocabulary(tokenizer, vocab_size)
        except ImportError:
            self._vocabulary = None

    def __call__(self, kind: str, guide: str | None) -> TokenGrammar:
        """Return the grammar of one request.

        Arguments:
            kind: `json`, `json_schema` or `regex`.
            guide: the schema or the expression.

        Raises:
            RequestError: a guide that cannot be followed, with the library's own reason.
        """
        if self._vocabulary is None:
            raise RequestError(
                "guided_decoding_guide_type",
                kind,
                "nothing: llguidance is not installed (pip install llguidance)",
            )
        import llguidance

        num_bytes = _num_bytes(guide)
        if num_bytes > MOST_GUIDE_BYTES:
            allowed = f"at most {MOST_GUIDE_BYTES} bytes"
            raise RequestError("guided_decoding_guide", f"a {kind} of {num_bytes} bytes", allowed)
        try:
            source = _source(kind, guide)
        except ValueError as error:
            raise RequestError("guided_decoding_guide", guide, f"a {kind} ({error})") from None
        matcher = llguidance.LLMatcher(self._vocabulary, source, log_level=0)
        grammar = TokenGrammar(matcher, end_ids=self._vocabulary.eos_tokens, vocab_size=self._vocab_size)
        if not matcher.is_error():
            grammar.allowed(())  # some guides fail only here; the first step finds the mask made
        if matcher.is_error():
            raise RequestError(
                "guided_decoding_guide", guide, f"a {kind} that can be followed ({_reason(matcher)})"
            )
        return grammar


class TokenGrammar:
    """State of one request: how far its committed tokens have come. See `request.Grammar`."""

    def __init__(self, matcher: llguidance.LLMatcher, *, end_ids: list[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids  # the library's own: they are allowed wherever the answer may end
        self._vocab_size = vocab_size
        self._states: dict[tuple[int, ...], tuple[Mask | None, bool]] = {}

    def allowed(self, drafted: tuple[int, ...]) -> Mask | None:
        return self._state(drafted)[0]

    def may_end(self, drafted: tuple[int, ...]) -> bool:
        return self._state(drafted)[1]

    def commit(self, token_ids: tuple[int, ...]) -> None:
        count = len(token_ids)
        self._states = {
            drafted[count:]: state for drafted, state in self._states.items() if drafted[:count] == token_ids
        }
        if not self._matcher.consume_tokens(list(token_ids)):
            raise RequestError(
                "guided_decoding_guide",
                list(token_ids),
                f"a guide that can be followed up to here ({_reason(self._matcher)})",
            )

    def _state(self, drafted: tuple[int, ...]) -> tuple[Mask | None, bool]:
        state = self._states.get(drafted)
        if state is None:
            state = self._states[drafted] = self._walk(drafted)
        return state

    def _walk(self, drafted: tuple[int, ...]) -> tuple[Mask | None, bool]:
        count = self._matcher.try_consume_tokens(list(drafted)) if drafted else 0
        try:
            if count < len(drafted):
                return None, False
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            mask = np.unpackbits(words, count=self._vocab_size, bitorder="little").astype(np.bool_)
            mask[self._end_ids] = False  # whether the answer may end is the caller's to apply
            return mask, bool(self._matcher.is_accepting())
        finally:
            if count:
                self._matcher.rollback(count)


def try_guide(kind: str, guide: str | None) -> None:
    """Compile a guide over a vocabulary of bytes, be it right or wrong, for whoever wants to know how long it takes."""
    if _num_bytes(guide) > MOST_GUIDE_BYTES:  # the compiler says so, and what is wrong below
        return
    try:
        import llguidance

        source = _source(kind, guide)
    except (ImportError, ValueError):
        return
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()


def _num_bytes(guide: str | None) -> int:
    return len((guide or "").encode())


def _source(kind: str, guide: str | None) -> str:
    """Return a guide as the library's own grammar.

    Raises:
        ValueError: it cannot be read.
    """
    import llguidance

    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(guide or "")
    schema = '{"type": "object"}' if kind == "json" else guide or ""
    return llguidance.LLMatcher.grammar_from_json_schema(
        _checked_json(schema),
        overrides=_JSON_OPTIONS,  # type: ignore[arg-type]  # its type is not exported
    )


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Return what the library says is wrong, in one line and without the parser's state."""
    return " ".join(matcher.get_error().partition("<state>")[0].split())[:300]


class _View:
    """What the library wants to see of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.eos_token_id = tokenizer.eos_ids[0] if tokenizer.eos_ids else vocab_size - 1
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [
            token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    import llguidance

    view = llguidance.TokenizerWrapper(_View(tokenizer, vocab_size))
    return llguidance.LLTokenizer(view, n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids) or None)


def _checked_json(text: str) -> str:
    """Return a text that holds a JSON object or true/false.

    Raises:
        ValueError: it does not.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema is an object")
    return text
