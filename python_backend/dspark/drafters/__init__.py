"""Drafters: everything that proposes tokens, behind one interface. See `interface`."""
