"""Answers that a strict reader takes for right, and others: pairs in the forms of public benchmarks (GSM8K,
MATH, AIME, multiple choice, BIG-bench's words and dates), each with its verdict."""

import pytest

from rose.parts.tasks.envs._math import reward

# gold, answer, verdict
# fmt: off
PAIRS = [
    ("5", r"\boxed{5}", 1), ("5", r"\boxed{6}", 0), ("5", "The answer is 5.", 1), ("5", "so 2 + 3 = 5", 1),
    ("5", r"First \boxed{6}. No, that is wrong: \boxed{5}", 1), ("5", r"\boxed{5}? No, \boxed{6}", 0),
    ("5", r"\boxed{5} or maybe \boxed{", 1), ("5", r"\boxed{\boxed{5}}", 1), ("5", r"\fbox{5}", 1),
    ("5", r"<think>\boxed{5}</think> no idea", 0), ("5", r"<think>\boxed{5}", 0),
    ("5", r"<think>\boxed{4}</think>\boxed{5}", 1), ("5", r"\boxed{5}<think>but \boxed{6}", 1),
    ("5", "", 0), ("5", r"\boxed{}", 0), ("5", r"\boxed{5, 6}", 0), ("5", r"\boxed{x = 5}", 1),
    ("5", r"\boxed{\text{five}}", 0), ("7", "3 + 4 = 7\n#### 7", 1), ("1+6 = 7\n#### 7", r"\boxed{7}", 1),
    ("7", "#### 8", 0), ("72", "48/2 = 24\n48 + 24 = 72\n#### 72", 1), ("1,000", r"\boxed{1000}", 1),
    ("1000", r"\boxed{1,000}", 1), ("1,234,567", r"\boxed{1234567}", 1), ("12.0", r"\boxed{12}", 1),
    ("-3", r"\boxed{3}", 0), ("-3", r"\boxed{-3}", 1), ("1/2", r"\boxed{\frac{1}{2}}", 1),
    ("1/2", r"\boxed{0.5}", 1), ("1/2", r"\boxed{\dfrac12}", 1), ("1/2", r"\boxed{1}", 0),
    (r"\frac{3}{4}", r"\boxed{0.75}", 1), (r"2\sqrt{3}", r"\boxed{2\sqrt{3}}", 1),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1), (r"2\sqrt{3}", r"\boxed{2}", 0), (r"\pi", r"\boxed{\pi}", 1),
    (r"\pi", r"\boxed{3.14}", 0), ("3x^2", r"\boxed{3x^2}", 1), ("3x^2", r"\boxed{3x}", 0),
    ("x^2-1", r"\boxed{(x-1)(x+1)}", 1), ("ab", r"\boxed{ba}", 1), ("(1, 2)", r"\boxed{(1,2)}", 1),
    ("(1, 2)", r"\boxed{(2,1)}", 0), (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1), ("[0, 1)", r"\boxed{[0,1)}", 1),
    ("[0, 1)", r"\boxed{(0,1)}", 0), (r"\infty", r"\boxed{\infty}", 1), (r"10\%", r"\boxed{10\%}", 1),
    (r"90^\circ", r"\boxed{90^\circ}", 1), (r"12 \text{ cm}", r"\boxed{12}", 1),
    ("B", r"\boxed{B}", 1), ("B", r"\boxed{\text{B}}", 1), ("B", r"\boxed{\textbf{(B)}}", 1), ("B", "The answer is (B).", 1),
    ("(B)", r"\boxed{B}", 1), ("B", r"\boxed{D}", 0), ("B", r"\boxed{\text{(D)}}", 0), ("B", "Answer: C", 0),
    ("east", r"\boxed{\text{east}}", 1), ("east", r"\boxed{seat}", 0), ("east", r"\boxed{East}", 1),
    (r"\text{Evelyn}", r"\boxed{Evelyn}", 1), ("Evelyn", "The answer is Evelyn.", 1), ("Evelyn", r"\boxed{Briana}", 0),
    ("ABC", r"\boxed{BCA}", 0), ("no", r"\boxed{on}", 0), ("No", r"\boxed{\text{No}.}", 1), ("true", r"\boxed{false}", 0),
    ("2014", r"\boxed{2021-03-04}", 0), ("2021-03-04", r"\boxed{2014}", 0), ("2021-03-04", r"\boxed{2021-03-04}", 1),
    ("12/25/2020", r"\boxed{12/25/2020}", 1), ("12/24/2020", r"\boxed{1/4040}", 0),
    ("March 4, 2021", r"\boxed{\text{March 4, 2021}}", 1), ("March 4, 2021", r"\boxed{4}", 0),
    ("3:30", r"\boxed{3:30}", 1), ("3:30", r"\boxed{3:40}", 0), ("3:30", r"\boxed{3}", 0), ("3 : 4", r"\boxed{3:4}", 1),
    (12, r"\boxed{12}", 1), (0.5, r"\boxed{1/2}", 1), ("42.", r"\boxed{42}", 1), (r"so \boxed{12}", r"\boxed{12}", 1),
    (r"thus $x = \frac{3}{4}$", r"\boxed{0.75}", 1), (r"\$18", r"\boxed{18}", 1), ("18", r"\boxed{\$18}", 1),
    ("18", r"\boxed{18 \text{ dollars}}", 1), ("x", r"\boxed{x}", 1), ("x", r"\boxed{y}", 0),
    ("1e3", r"\boxed{1000}", 1), (1e-05, r"\boxed{0.00001}", 1), ("listen", r"\boxed{silent}", 0), ("apple, pear", r"\boxed{\text{apple},\text{pear}}", 1),
    ("B", "Answer: B) 12 km", 1), ("18", r"\boxed{18 \text{ marbles}}", 1), ("$18", r"\boxed{18}", 1), ("B, D", r"\boxed{\text{B},\text{D}}", 1),
    ("12/25", r"\boxed{0.48}", 1), ("5", r"\boxed{10-3-2}", 1), ("31.12.1999", r"\boxed{12/31/1999}", 0), ("7 May", r"\boxed{7}", 0),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", 1),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}", 0),
    ("Thursday", "It is a **Thursday**", 0), ("10^{6}", r"\boxed{1000000}", 1), ("0", r"\boxed{0}", 1), ("0", r"\boxed{}", 0),
    # units, currencies, percent signs and scales, full stops and Markdown around a number
    ("18", "#### 18.", 1), ("18", "#### 18 dollars", 1), ("18", "#### **18**", 1), ("18", r"\boxed{18 dollars}", 1),
    ("18", r"\boxed{18\,cm}", 1), ("18", r"\boxed{18~\text{cm}^3}", 1), ("30", r"\boxed{\text{30 minutes}}", 1),
    ("60", r"\boxed{60 km/h}", 1), ("18", r"\boxed{€18}", 1), ("0.5", r"\boxed{1/2 cup}", 1), ("2", r"\boxed{2 sin x}", 0),
    ("60", r"\boxed{60\%}", 1), ("60%", r"\boxed{60}", 1), ("0.6", r"\boxed{60\%}", 1), ("60%", r"\boxed{6000\%}", 0),
    ("60", r"\boxed{6\%}", 0), ("5000000", r"\boxed{\$5 \text{ million}}", 1), ("5 million", r"\boxed{5 billion}", 0),
    # thousands behind a space, which were a product of 0; bases, which were dropped
    ("5 dollars", r"\boxed{5 cents}", 0), ("€5", r"\boxed{\$5}", 0), ("5 dollars", r"\boxed{\$5}", 1), ("5 km", r"\boxed{5 cm}", 0),
    ("25 cm", r"\boxed{25 cm^2}", 0), ("60 km", r"\boxed{60 km/h}", 0), ("60 km/h", r"\boxed{60 km / h}", 1),
    ("3 hours", r"\boxed{3 hour}", 1), ("3 hours", r"\boxed{3 minutes}", 0), ("90 degrees", r"\boxed{90°}", 1),
    ("3 million", r"\boxed{3}", 0), ("3", r"\boxed{3 hundred}", 0), ("10", r"\boxed{10 dozen}", 0), ("2", r"\boxed{2 theta}", 0),
    ("7", r"\boxed{7 factorial}", 0), ("5", r"\boxed{5 squared}", 0), ("6", r"\boxed{6 minus}", 0), ("5", r"\boxed{5 abc}", 0),
    ("12000", r"\boxed{12\,000}", 1), ("0", r"\boxed{12\,000}", 0), ("2, 300", r"\boxed{2, 300}", 1),
    ("101_2", r"\boxed{101_{2}}", 1), ("101_2", r"\boxed{101_3}", 0), ("101_2", r"\boxed{101}", 1),
    # choices and words in a sentence
    ("B", "The answer is (B) or (C)", 0), ("D", "D) B and C", 1), ("B", "The correct option is (B).", 1), ("B", "Option B", 1),
    ("yes", "The answer is: Yes", 1), ("yes", "**Answer**: Yes", 1), ("Paris", "The answer is **Paris**.", 1),
    ("B", "Final Answer: The final answer is $B$. I hope it is correct.", 1), (r"\varnothing", r"\boxed{\emptyset}", 1),
]
# fmt: on


@pytest.mark.parametrize("gold, text, right", PAIRS)
def test_the_last_complete_answer_outside_of_thoughts_is_compared(gold, text, right):
    assert reward(text, {"answer": gold}) == right
