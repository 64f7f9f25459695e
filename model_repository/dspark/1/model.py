"""Triton loads this file; the model is the class that it imports."""

from dspark.serving.triton_model import TritonPythonModel as TritonPythonModel
