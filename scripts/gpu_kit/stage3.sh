# The speed of an engine that has the card and the whole KV cache for itself, and what bounds it. At most 270 s.
. scripts/gpu_kit/env.sh
NAME=engine LIMIT=${1:-260} check engine rate
results
