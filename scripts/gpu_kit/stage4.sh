# The machine itself, and what makes a trainer's step cheaper, each beside the same without it. At most 600 s.
. scripts/gpu_kit/env.sh
model
NAME=machine LIMIT=150 check machine pool micro
NAME=liger LIMIT=160 check liger
for stage in 2 3; do NAME=compile_zero$stage LIMIT=${1:-220} check compile_zero$stage; done
results
