"""The serving side: ranks of serving jobs that join a running training job and leave again, and the
online server that may share their device.

`python -m rose.serving` is the operator's command. `lender` waits for the run; `member` is one
membership, in a process of its own. With a server: `operate` starts `server` and lender, `control`
says what may be lent, `web` and `report` show what came of it. May import config, coserving,
engine, launch; vLLM only inside of functions.
"""
