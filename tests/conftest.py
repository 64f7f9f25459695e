"""Shared test setup: makes tests/support importable as `support`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The Triton-language interpreter must be chosen before any kernel module is imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent))
