"""DSpark speculative decoding, online side: engine, drafters, scheduling, calibration and the Triton model.

Importing this package imports neither torch nor Triton; the modules that need them do.
"""

__version__ = "0.1.0"
