"""Errors in the shape that OpenAI's clients read: `{"error": {message, type, param, code}}` and an HTTP status."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["ApiError", "from_wire", "refused", "unreachable"]

_STATUS: Final = {"INVALID_ARG": 400, "UNAVAILABLE": 503, "CANCELLED": 499, "INTERNAL": 500}
_WIRE: Final = re.compile(r"^(?:\[[A-Za-z]+\] )*\[([A-Z_]+)\] (?:([a-z_]+): got )?", re.DOTALL)
# Our names of fields that the client sent under another one.
_PARAMS: Final = {"stop_words": "stop", "text_input": "prompt", "guided_decoding_guide": "response_format"}


class ApiError(Exception):
    """One refused or failed request.

    Arguments:
        param: name of the field at fault, where there is one.
        code: OpenAI's word for machines ("model_not_found"), where there is one.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return what goes over the wire."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(param: str, value: object, allowed: str) -> ApiError:
    """Return the error for a value that cannot be taken."""
    shown = repr(value)
    shown = shown if len(shown) <= 120 else shown[:117] + "..."
    return ApiError(400, f"{param}: got {shown}, allowed is {allowed}", param=param, code="invalid_value")


def from_wire(message: str) -> ApiError:
    """Return the error for a message of the model, which begins with its code."""
    match = _WIRE.match(message)
    if match is None:
        return ApiError(500, message)
    status = _STATUS.get(match[1], 500)
    param = None if match[2] is None else _PARAMS.get(match[2], match[2])
    return ApiError(status, message, param=param, code=match[1].lower())


def unreachable(reason: str) -> ApiError:
    """Return the error for a model that cannot be reached."""
    return ApiError(503, f"the model cannot be reached: {reason}", code="unavailable")
