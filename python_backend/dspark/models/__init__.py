"""Checkpoints and the models they describe: configuration, weights, tokenizers."""
