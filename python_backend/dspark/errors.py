"""Every error this package raises on purpose.

Each message says what must hold, what was given and what to do. `code` is the word that travels on the
wire in front of the message (Triton streams carry no status code).
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DSparkError",
    "EngineError",
    "NonFiniteError",
    "RequestError",
]


class DSparkError(Exception):
    """Base of all errors of this project."""

    code = "INTERNAL"


class ConfigError(DSparkError):
    """A configuration file, option or environment variable that cannot be used."""

    code = "INVALID_ARG"


class CheckpointError(DSparkError):
    """A checkpoint that cannot be served: unknown maths, missing tensors, another target."""

    code = "INVALID_ARG"


class RequestError(DSparkError):
    """One request that cannot be served; the others go on.

    Arguments:
        field: name of the field as it stands on the wire.
        value: what was given.
        allowed: what would have been accepted, as a phrase ("a number in (0, 1]").
    """

    code = "INVALID_ARG"

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field}: got {shown}, allowed is {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class CapacityError(DSparkError):
    """No room for the request now: queue full, or pages for it do not exist."""

    code = "UNAVAILABLE"


class EngineError(DSparkError):
    """The engine stopped or died; open requests are failed with this."""

    code = "UNAVAILABLE"


class NonFiniteError(DSparkError):
    """The target produced NaN or infinite logits for this request."""

    code = "INTERNAL"
