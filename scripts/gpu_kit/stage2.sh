# The engine, stops between layers, weights on the device, the head's kernels and a trainer's step, alone on the card. At most 545 s; on an H200 `delta` took 42 s, `head` 26, `speed` 145.
. scripts/gpu_kit/env.sh
model
NAME=engine LIMIT=120 check engine
NAME=stops LIMIT=${1:-100} check stops
NAME=delta LIMIT=100 check delta --set 'delta.models=[0.6B, 7B]'
NAME=head LIMIT=60 check head
NAME=speed LIMIT=165 check speed
results
