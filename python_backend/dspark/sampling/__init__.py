"""Sampling maths over arrays: counter-based noise, logit transforms, verification.

No engine, no torch, no clock.
"""
