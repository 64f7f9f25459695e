"""Which drafter a cost curve or a calibration was made with."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dspark.models.fingerprint import fingerprint

__all__ = ["drafter_identity"]


def drafter_identity(spec: str) -> str:
    """Return a digest over configuration and weights of a drafter's folder or file; the name of one without either."""
    folder = Path(spec)
    if folder.is_file():
        return fingerprint([folder])
    if not folder.is_dir():
        return spec
    digest = hashlib.sha256()
    for path in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()
