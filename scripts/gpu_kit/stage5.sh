# A trainer's step as the launcher chooses it for several GPUs: ZeRO-3 with the head's kernels and Liger's. At most 240 s.
. scripts/gpu_kit/env.sh
model
NAME=speed3 LIMIT=200 check speed --set speed.stage=3 --set speed.beside=false
results
