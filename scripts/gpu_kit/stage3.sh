# The speed of an engine that has the card and the whole KV cache for itself. At most 160 s.
. scripts/gpu_kit/env.sh
NAME=engine LIMIT=${1:-150} check engine
results
