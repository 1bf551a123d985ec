# The speed of an engine that has the card and the whole KV cache for itself, and that of new weights. At most 400 s.
. scripts/gpu_kit/env.sh
NAME=engine LIMIT=${1:-150} check engine
NAME=delta LIMIT=240 check delta
results
