"""Keeping confidences honest: offline fits and their measures. Arrays in, arrays out; no engine, no torch."""
