"""Executors run the models: one ragged target pass, one drafter block pass. See `interface`."""
