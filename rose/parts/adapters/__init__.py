"""Agents and environments that were written for other frameworks. `gateway` is an OpenAI and
Anthropic API in front of the run's engines, through which agents' own programs are trained; `envs`
are this and the environments of verifiers, TextArena, OpenEnv, MCP, Reasoning Gym and MiniGrid.
"""
