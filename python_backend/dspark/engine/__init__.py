"""The engine: batch, draft, schedule, verify, commit, learn. `engine.Engine.step` is the page to read."""
