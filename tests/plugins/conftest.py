"""Plugins start kernels under the Triton language's interpreter here; it must be chosen before they are imported."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from support import fast_interpreter

fast_interpreter.install()

# The interpreter of 3.6 turns one-element arrays into loop bounds, which numpy 1.25 and later grumble about.
_INTERPRETER = "ignore:Conversion of an array with ndim:DeprecationWarning:triton.runtime.interpreter"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/plugins" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings(_INTERPRETER))
