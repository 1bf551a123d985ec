# What no GPU has run to its end, alone on the card, the most important first. At most 550 s.
. scripts/gpu_kit/env.sh
model
# The profile took 89 s on an H200; three starts of engines follow, of up to 55 s there and 75 s on an H100, and 50 s of phases.
NAME=coserving LIMIT=375 check coserving --set coserving.profile_s=8 --set coserving.phase_s=7
results
# Whether an engine gains by a process of its own for its model, beside `engine` of stage 2.
NAME=engine_worker LIMIT=150 check engine --set engine.executor=mp
keep
