"""Command-line client, load tests and plots over gRPC. Never imports torch."""

__version__ = "0.1.0"
