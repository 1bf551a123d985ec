# What no GPU has run yet, alone on the card, the most important first. At most 430 s; `transfer` and `trainer` of stage 3 publish DeepSpeed's own partitions.
. scripts/gpu_kit/env.sh
model & NAME=delta LIMIT=100 check delta --set 'delta.models=[0.6B, 7B]' & wait
model
NAME=head LIMIT=60 check head & NAME=speed LIMIT=165 check speed --set speed.profiled=true & wait
NAME=coserving LIMIT=225 check coserving --set coserving.profile_s=8 --set coserving.phase_s=7
keep
