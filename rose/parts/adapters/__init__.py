"""Agents and environments that were written for other frameworks. `gateway` serves the run's
engines by the APIs of OpenAI and Anthropic, so that agents' own programs can be trained. `envs` has
these agents, and the environments of verifiers, TextArena, OpenEnv, MCP, Reasoning Gym and
MiniGrid."""
