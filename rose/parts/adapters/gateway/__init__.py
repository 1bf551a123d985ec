"""The gateway runs agents that were written for another API, unmodified.

An agent's program (`program`) gets an address and a key for each trajectory (`session`). It calls
OpenAI's or Anthropic's API or vLLM's token route (`server`, one file per API). Each call becomes a
turn like any other, and the call histories become a tree of tokens (`history`). The package may
import the packages that `rose.agent` may import, and must know nothing of engines.
"""
