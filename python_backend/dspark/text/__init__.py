"""From token ids to text that may leave: incremental UTF-8, stop strings held back."""
