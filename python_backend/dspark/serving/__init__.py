"""The Triton model and its launcher; the wire contract lives here."""
