"""OpenAI-compatible HTTP in front of the Triton model: a small process of its own, started by `dspark serve`."""
