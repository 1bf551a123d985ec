"""The trained policy plays a held-out task in the terminal, or talks with the user.

`source` finds the policy and the task, `policy` runs the engine, `game` plays one task, `talk`
holds a conversation, `typed` reads what a person types, `screen` draws, and `session` decides the
order. The package stands above the environment host and the engine and uses both as a run does. It
knows no MPI and no trainer.
"""
