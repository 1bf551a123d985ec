"""Speculative drafts of a turn's next tokens, looked up in its own text and in its siblings' texts.
Siblings are the other trajectories of its group.

This is Seer's grouped speculative decoding (arXiv 2511.14617), through vLLM's speculative method
`custom_class`. `text` holds a group's texts and finds drafts in them, and `gain` decides how long
drafts are. `proposer` has the class that vLLM calls, and `siblings` forwards tokens of siblings
between engines. Importing this package imports nothing else.
"""
