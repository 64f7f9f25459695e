"""Triton loads this file; the model is the class that it imports."""

import triton_python_backend_utils as pb_utils
from dspark.serving.forward import ForwardingModel


class TritonPythonModel(ForwardingModel):
    backend = pb_utils
