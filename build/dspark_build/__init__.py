"""Offline side: checkpoints, training, evaluation, calibration, cost curves, export, TensorRT engines."""
