"""Compiled kernels as a plan carries them: one architecture's cubins and what a launch needs to know of each."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from dspark_plugins.kernels.plans import Variant
from dspark_plugins.kernels.signatures import arguments_of

__all__ = ["Form", "decode_forms", "encode_forms", "pick"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One compiled form of a kernel."""

    key: str  # of its variant
    sm: int
    symbol: str  # function in the cubin
    arguments: tuple[tuple[str, str], ...]  # name and type, in order
    num_threads: int
    shared_bytes: int  # dynamic shared memory of a program
    cooperative: bool
    cubin: bytes
    sha256: str = field(init=False)  # of the cubin; reckoned once, as every launch asks for it

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha256", hashlib.sha256(self.cubin).hexdigest())


def pick(forms: Mapping[str, Form], variant: Variant) -> Form:
    """Return the compiled form of a variant.

    Raises:
        ValueError: it is not among them, or was compiled from other sources than these.
    """
    form = forms.get(variant.key)
    if form is None:
        raise ValueError(f"no compiled kernel {variant.key}, there are {', '.join(forms) or 'none'}")
    if form.arguments != arguments_of(variant):
        raise ValueError(
            f"kernel {variant.key} was compiled with other arguments than this version passes; build the engine anew"
        )
    return form


def encode_forms(forms: Iterable[Form]) -> tuple[bytes, bytes]:
    """Return what `decode_forms` takes: a table (JSON) and the packed cubins."""
    return _encoded(tuple(sorted(forms, key=lambda form: form.key)))


@lru_cache(maxsize=8)  # a model's layers have the same forms, and TensorRT asks each several times
def _encoded(ordered: tuple[Form, ...]) -> tuple[bytes, bytes]:
    table = [
        {
            "key": form.key,
            "sm": form.sm,
            "symbol": form.symbol,
            "arguments": form.arguments,
            "num_threads": form.num_threads,
            "shared_bytes": form.shared_bytes,
            "cooperative": form.cooperative,
            "cubin_bytes": len(form.cubin),
            "sha256": form.sha256,
        }
        for form in ordered
    ]
    packed = zlib.compress(b"".join(form.cubin for form in ordered))
    return json.dumps(table, separators=(",", ":")).encode(), packed


@lru_cache(maxsize=8)  # a model's layers hold the same ones
def decode_forms(table: bytes, packed: bytes) -> Mapping[str, Form]:
    """Return forms by their variants' keys.

    Raises:
        ValueError: the data are damaged.
    """
    found: dict[str, Form] = {}
    try:
        cubins, rows = zlib.decompress(packed), json.loads(table)
        at = 0
        for row in rows:
            size, sha256 = row.pop("cubin_bytes"), row.pop("sha256")
            arguments = tuple((name, kind) for name, kind in row.pop("arguments"))
            form = Form(**row, arguments=arguments, cubin=cubins[at : at + size])
            at += size
            if form.sha256 != sha256:
                raise ValueError(f"kernel {form.key} is damaged, its hash is not {sha256}")
            found[form.key] = form
    except (zlib.error, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the plan's kernels cannot be read ({error!r}); build the engine anew") from error
    return found
