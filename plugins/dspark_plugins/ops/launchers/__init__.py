"""Typed launchers: take what an op takes, start its kernels, return what the op returns.

They run on CUDA tensors, and on CPU tensors under the Triton language's interpreter.
"""
