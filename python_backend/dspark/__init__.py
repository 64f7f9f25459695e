"""DSpark speculative decoding, online side: engine, drafters, scheduling, calibration and the Triton model.

Importing this package imports neither torch nor Triton; the modules that need them do.
"""

import os

# Products of numpy are small here, and a second thread of its library goes on spinning behind each of them, on a core
# that the next pass needs. Holds where numpy was not imported before; the launcher tells the model's process.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

__version__ = "0.1.0"
