"""What decides exported graphs, as one hash: told values, and the code that turns a checkpoint into them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import dspark

__all__ = ["EXPORT_SOURCES", "inputs_hash"]

_DSPARK = Path(dspark.__file__ or "").parent
EXPORT_SOURCES = (
    *Path(__file__).parent.glob("export*.py"),
    *(path for path in (_DSPARK / "models").glob("*.py") if "token" not in path.name),
    *(_DSPARK / "drafters" / name for name in ("checkpoint.py", "layout.py")),
    _DSPARK / "executors" / "tensorrt_bindings.py",
)


def inputs_hash(told: object, sources: Iterable[Path]) -> str:
    """Return a digest over values, by how they are shown, and over files, by name and contents."""
    digest = hashlib.sha256(repr(told).encode())
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
