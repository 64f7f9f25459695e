"""Operations of DSpark: plain references, Triton-language kernels, native CPU code, TensorRT plugins.

Importing this package imports none of torch, triton and tensorrt; its sub-packages do.
"""
