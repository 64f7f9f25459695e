"""Plain PyTorch versions of every op: what the kernels are checked against, and the CPU path where fast
enough.
"""
