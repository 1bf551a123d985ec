# The speed of an engine that has the card and the whole KV cache for itself, what bounds it, and that of new weights. At most 510 s.
. scripts/gpu_kit/env.sh
NAME=engine LIMIT=${1:-260} check engine rate
NAME=delta LIMIT=240 check delta
results
