"""The prompts that `bench` measures with: sixteen questions of many lengths, texts that are copied, texts that are new.

Every round puts its number in front, so that no round finds the prompts of an earlier one in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.models.tokenizer import Tokenizer

__all__ = ["MIXED", "NEW", "REPEATING", "as_messages", "chat_ids"]

_CODE = """def total(prices):
    result = 0
    for price in prices:
        result = result + price
    return result

def mean(prices):
    return total(prices) / len(prices)
"""

_ACCOUNT = """class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        self.balance = self.balance - amount
        return self.balance
"""

_REPORT = (
    "The town library opened in 1902 in a former grain store. Its first librarian, Clara Whitfield, lent out four "
    "hundred books in the first month. A fire in 1931 destroyed the reading room, and it was rebuilt with the help of "
    "volunteers. Today the library holds sixty thousand volumes and lends music and tools as well."
)

MIXED = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Tell a short story about a lighthouse keeper who finds a letter.",
    "List five uses of salt in the kitchen, and say for each of them why it works.",
    "Write a polite note to a neighbour whose dog barks at night. Offer to walk it, and suggest a time to meet.",
    f"Summarise this in two sentences: {_REPORT}",
    f"Explain line by line what this Python code does:\n```python\n{_CODE}```",
    "What does a compiler do?",
    "Plan a weekend in a small town by the sea for two people who like books, long walks and cheap food. They arrive "
    "on Friday evening by train, have no car, and must leave on Sunday before four in the afternoon.",
    "Give me a recipe for lentil soup for four people, with amounts in grams.",
    "Who was Ada Lovelace?",
    "How do I remove a coffee stain from a wooden table without harming the varnish?",
    f"Which year did the fire happen, and who was the first librarian? {_REPORT}",
    "Compare tea and coffee in three sentences.",
    "Describe a tram ride through a city in the rain, in the first person, as a letter to a friend who moved away.",
    "Name three rivers of Europe and a city on each.",
)

REPEATING = (
    f"Fix the spelling mistakes in this report and print it again:\n\n{_REPORT.replace('rebuilt', 'rebuild')}",
    f"Add type hints to this code:\n```python\n{_ACCOUNT}```",
    f"Rewrite this text with every sentence on a line of its own:\n\n{_REPORT}",
)

NEW = (MIXED[2], MIXED[4], MIXED[14])


def as_messages(prompt: str, round_number: int) -> list[dict[str, str]]:
    """Return the chat messages of one prompt in one round."""
    return [{"role": "user", "content": f"({round_number}) {prompt}"}]


def chat_ids(tokenizer: Tokenizer, prompts: Sequence[str], round_number: int) -> list[tuple[int, ...]]:
    """Return the token ids of prompts in one round, by the model's own chat template."""
    return [tuple(tokenizer.apply_chat_template(as_messages(prompt, round_number))) for prompt in prompts]
