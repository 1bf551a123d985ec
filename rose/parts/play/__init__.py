"""Let the trained policy play a held-out task in the terminal, or talk with the user.

`source` finds the policy and the task, `policy` runs the engine, `game` plays one task, `talk`
holds a conversation, `typed` reads a person's lines, `screen` draws, and `session` decides the
order. The package uses the environment host and the engine as a run does, without MPI and without a
trainer.
"""
