"""The tokenizer that a GGUF file carries in its metadata, rebuilt on the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from dspark.errors import CheckpointError
from dspark.models.chat_template import ChatTemplate
from dspark.models.gguf_file import GgufFile
from dspark.models.tokenizer import Tokenizer

__all__ = ["read_gguf_tokenizer"]

# How llama.cpp numbers token types.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORDS_AND_SIGNS
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORDS_AND_SIGNS

# Splitting patterns by `tokenizer.ggml.pre`, applied one after another to what the ones before left.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "smollm": (r"\p{N}", _GPT2),  # digits one by one
}


def read_gguf_tokenizer(file: GgufFile, *, eos_ids: Sequence[int]) -> Tokenizer | None:
    """Build the tokenizer of a GGUF file; None where the file has none.

    Raises:
        CheckpointError: for a tokenizer model or pre-tokenizer that is not known, and metadata that does not
            fit.
    """
    fields, where = file.metadata, str(file.path)
    model = fields.get("tokenizer.ggml.model")
    if model in (None, "no_vocab", "none"):
        return None
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{where}: tokenizer.ggml.model is {model!r}, allowed are 'gpt2' and 'llama'")
    tokens = _list(fields, "tokenizer.ggml.tokens", where)
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    strips = False
    if model == "gpt2":
        backend = _byte_level(fields, tokens, where)
    else:
        strips = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
        backend = _sentencepiece(fields, tokens, types, strips, where)
    backend.add_special_tokens(_added(tokens, types, _CONTROL, special=True))
    backend.add_tokens(_added(tokens, types, _USER_DEFINED, special=False))
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    _add_ends(backend, fields, tokens, bos_id, model)
    named = {}
    for name, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("pad_token", "padding"),
        ("unk_token", "unknown"),
    ):
        token_id = fields.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            named[name] = tokens[token_id]
    template = fields.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        family="byte_level" if model == "gpt2" else "sentencepiece",
        leading_space_stripped=strips,
        eos_ids=eos_ids,
        bos_id=bos_id,
        chat_template=None if not template else ChatTemplate(template, special_tokens=named, where=where),
        special_ids=[*eos_ids, *(i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL))],
    )


def _byte_level(fields: Mapping[str, Any], tokens: list[str], where: str) -> Backend:
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in _PATTERNS:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre is {pre!r}, allowed are {', '.join(map(repr, _PATTERNS))}"
        )
    merges = []
    for merge in _list(fields, "tokenizer.ggml.merges", where):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        # Llama 3 takes a word that is a token as it is, whatever the merges say.
        model = BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the tokenizers package raises plain Exception
        raise CheckpointError(f"{where}: tokenizer.ggml.merges do not fit the tokens ({error})") from error
    backend = Backend(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    fields: Mapping[str, Any], tokens: list[str], types: Sequence[int], space_prefix: bool, where: str
) -> Backend:
    scores = _list(fields, "tokenizer.ggml.scores", where)
    if len(scores) != len(tokens):
        raise CheckpointError(
            f"{where}: tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
        )
    vocabulary = _vocabulary(tokens)
    unknown = next((tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN), None)
    backend = Backend(
        BPE(
            vocab=vocabulary,
            merges=_merges_of(vocabulary, scores, types),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    marks = [normalizers.Replace(" ", "\u2581")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), *marks] if space_prefix else marks
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _merges_of(
    vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the merges that make every piece from two others, best score first.

    Sentencepiece merges the neighbours whose joined piece scores highest, which is what a rank by score does.
    """
    ranked = []
    for piece, token_id in vocabulary.items():
        if types[token_id] != 1:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[token_id], token_id, vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    return vocabulary


def _added(tokens: list[str], types: Sequence[int], kind: int, *, special: bool) -> list[AddedToken]:
    return [
        AddedToken(token, special=special, normalized=False)
        for token, its_kind in zip(tokens, types, strict=True)
        if its_kind == kind and token
    ]


def _add_ends(
    backend: Backend, fields: Mapping[str, Any], tokens: list[str], bos_id: int | None, model: str
) -> None:
    """Put the begin and end tokens around a prompt where the file asks for them, by llama.cpp's defaults
    else.
    """
    default_bos = model == "llama" or fields.get("tokenizer.ggml.pre") == "llama-bpe"
    eos_id = fields.get("tokenizer.ggml.eos_token_id")
    before = (
        [bos_id] if bos_id is not None and fields.get("tokenizer.ggml.add_bos_token", default_bos) else []
    )
    after = [eos_id] if eos_id is not None and fields.get("tokenizer.ggml.add_eos_token", False) else []
    if before or after:
        names = [tokens[i] for i in before], [tokens[i] for i in after]
        backend.post_processor = processors.TemplateProcessing(
            single=[*names[0], "$A", *names[1]], special_tokens=[(tokens[i], i) for i in {*before, *after}]
        )


def _list(fields: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = fields.get(key)
    if not isinstance(value, list) or not value:
        raise CheckpointError(
            f"{where}: {key} is {'missing' if value is None else 'empty'}, allowed is a list of entries"
        )
    return value
