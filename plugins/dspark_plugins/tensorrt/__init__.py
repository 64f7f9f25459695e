"""TensorRT plugins of the device operations, with their compiled kernels inside; no torch and no Triton language.

Each operation's file, of the stem of its kernel, tells in plain Python what TensorRT asks: shapes, types, scratch
memory and launches. `plugin` turns that into plugin classes; importing it needs TensorRT, importing the rest does not.
"""
