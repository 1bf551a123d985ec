# What bounds an engine, whether its model gains by a process of its own, and stops between layers; alone on the card. At most 430 s.
. scripts/gpu_kit/env.sh
model
NAME=rate LIMIT=200 check rate
NAME=engine LIMIT=120 check engine
NAME=stops LIMIT=${1:-100} check stops
results
