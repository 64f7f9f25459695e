"""From token ids to text, a piece at a time, never half a character.

Knows nothing of stop strings. Joined pieces equal the whole byte string decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Decodes the bytes of tokens as UTF-8 as soon as their characters are complete.

    Bytes that are no UTF-8 become U+FFFD, the same ones whether they come in one token or in many.

    Arguments:
        token_bytes: bytes that one token stands for.
        is_special: tokens that never show in the text.
        strip_leading_space: drop one space at the very start of the text.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        is_special: Callable[[int], bool],
        *,
        strip_leading_space: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._is_special = is_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_leading_space  # until the first character is out

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is complete with it."""
        if self._is_special(token_id):
            return ""
        return self._stripped(self._decoder.decode(self._token_bytes(token_id)))

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character that never became complete. Nothing may follow."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
