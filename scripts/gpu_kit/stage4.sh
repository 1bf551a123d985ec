# The machine itself, and what makes a trainer's step cheaper, each beside the same without it. At most 600 s.
. scripts/gpu_kit/env.sh
model
NAME=machine LIMIT=150 check machine pool micro
# A trainer's step as the launcher chooses it for several GPUs: ZeRO-3 with the head's kernels and Liger's.
NAME=speed3 LIMIT=120 check speed --set speed.stage=3 --set speed.beside=false
NAME=liger LIMIT=160 check liger
for stage in 2 3; do NAME=compile_zero$stage LIMIT=${1:-200} check compile_zero$stage; done
results
