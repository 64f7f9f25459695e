"""Text to token ids and back, and the bytes of every single token.

Two families are known: byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM) and sentencepiece-style ones
with byte fallback (Llama 2). Decoding joins the tokens' bytes, so that text streamed token by token is the
text decoded at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import tokenizers

from dspark.errors import CheckpointError, RequestError
from dspark.models.chat_template import ChatTemplate

__all__ = ["Tokenizer", "TokenizerFamily"]

TokenizerFamily = Literal["byte_level", "sentencepiece"]

_SPACE_MARK = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """Return the printable character that stands for each byte in GPT-2's vocabularies, inverted.

    Printable Latin-1 bytes stand for themselves, the others take the code points from 256 upwards in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


class Tokenizer:
    """A `tokenizers.Tokenizer` with what serving needs around it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        family: TokenizerFamily,
        leading_space_stripped: bool,
        eos_ids: Sequence[int],
        bos_id: int | None,
        chat_template: ChatTemplate | None,
        special_ids: Iterable[int] = (),
    ) -> None:
        """Wrap a ready backend.

        Arguments:
            leading_space_stripped: the decoder drops one leading space of the whole text.
            special_ids: special tokens beside those that the backend marks as special itself.
        """
        self._backend = backend
        self._family = family
        self._chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special = {token_id for token_id, token in added.items() if token.special} | set(special_ids)
        self.leading_space_stripped = leading_space_stripped
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; special tokens written out in it become their ids.

        Raises:
            RequestError: for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError("text_input", text, f"valid Unicode text ({error.reason})") from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary
        nothing.
        """
        parts = (
            self.token_bytes(token) for token in ids if not (skip_special_tokens and token in self._special)
        )
        text = b"".join(parts).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.leading_space_stripped else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return exactly the bytes one token stands for (a special token: those of its name; unknown ids:
        none).
        """
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if piece is None:
            return b""
        if self._family == "sentencepiece":
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace(_SPACE_MARK, " ").encode()
        if all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        return piece.encode()

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which never show in an answer's text."""
        return token_id in self._special

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation, by the model's own template.

        Arguments:
            messages: objects with `role` and what the template needs, usually `content`.

        Raises:
            RequestError: on field `messages`, when there is no template or it does not accept them.
        """
        if self._chat_template is None:
            raise RequestError(
                "messages", list(messages), "nothing: this model has no chat template, use text_input"
            )
        text = self._chat_template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError("messages", list(messages), f"valid Unicode text ({error.reason})") from error
        return list(self._backend.encode(text, add_special_tokens=False).ids)


def decoder_family(decoder: object, *, where: str) -> tuple[TokenizerFamily, bool]:
    """Return the family and whether a leading space is stripped, from the JSON of a tokenizer's decoder.

    Raises:
        CheckpointError: for a decoder of another kind.
    """
    steps = [decoder] if isinstance(decoder, dict) else []
    if steps and steps[0].get("type") == "Sequence":
        steps = steps[0]["decoders"]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == _SPACE_MARK:
        return "sentencepiece", steps[0].get("prepend_scheme", "always") != "never"
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "ByteFallback" in kinds:
        replaces = [(step["pattern"], step["content"]) for step in steps if step["type"] == "Replace"]
        strips = [(step["content"], step["start"], step["stop"]) for step in steps if step["type"] == "Strip"]
        if replaces == [({"String": _SPACE_MARK}, " ")] and strips in ([], [(" ", 1, 0)]):
            return "sentencepiece", bool(strips)
    raise CheckpointError(
        f"{where}: the tokenizer's decoder is {kinds or decoder}, allowed are ByteLevel, Metaspace, "
        "and Replace + ByteFallback + Fuse (+ Strip of one leading space)"
    )
