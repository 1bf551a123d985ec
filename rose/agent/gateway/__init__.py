"""The gateway: agents that ROSE doesn't know, behind the APIs that they were written for.

A program (`program`) gets an address and a key for each trajectory (`session`); its calls over
OpenAI's or Anthropic's API or vLLM's token route (`server`, one file per API) become turns like any
other, and its histories a tree of tokens (`history`). May import what `rose.agent` may; must know
nothing of engines.
"""
