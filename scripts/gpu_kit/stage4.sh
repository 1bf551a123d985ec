# What makes a trainer's step cheaper, each beside the same without it. At most 600 s.
. scripts/gpu_kit/env.sh
NAME=liger LIMIT=160 check liger
NAME=compile LIMIT=${1:-430} check compile
results
