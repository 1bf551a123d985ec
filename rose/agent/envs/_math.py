r"""Whether a text's final answer is the right one in mathematics: math-verify's judgement.

1/2, 0.5 and \frac{1}{2} are one answer. Runs in a worker process with a limit: SymPy can compute
for ever. Package: math-verify (Kydlíček, 2025).
"""

from __future__ import annotations

from math_verify import parse, verify


def reward(text: str, row: dict) -> float:
    r"""1 if the last answer of `text`, thoughts left out, equals row["answer"], else 0. The answer
    is what stands in \boxed{}, or else the last formula or number."""
    gold = str(row["answer"]).strip().removesuffix(".")
    marked = any(mark in gold for mark in (r"\boxed", "$", "####"))
    # bare LaTeX is no formula to `parse`, which takes a number out of it: 2 of 2\sqrt{3}
    right = parse(gold if marked else rf"\boxed{{{gold}}}") or parse(gold)
    answer = parse(text.rpartition("</think>")[2])
    return float(bool(answer) and verify(right or [gold], answer))
