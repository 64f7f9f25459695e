"""How many drafted tokens each request may verify: pure functions over arrays."""
