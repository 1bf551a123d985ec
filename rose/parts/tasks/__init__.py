"""Tasks in text: sums with a calculator, reasoning, and the user's own prompts with their rewards.

They are examples of whole environments, with tools, examples and rules that check an answer. A run
in another environment, as the default run in the frozen lake, needs none of them.
"""
