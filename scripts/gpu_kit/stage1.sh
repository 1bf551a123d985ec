# What no GPU has run yet, alone on the card, the most important first. At most 570 s; `transfer` and `trainer` of stage 3 publish DeepSpeed's own partitions.
. scripts/gpu_kit/env.sh
model & NAME=delta LIMIT=100 check delta --set 'delta.models=[0.6B, 7B]' & wait
model
NAME=head LIMIT=60 check head & NAME=speed LIMIT=165 check speed --set speed.profiled=true & wait
# The profile took 89 s on an H200; three starts of engines follow, of up to 55 s there and 75 s on an H100, and 50 s of phases.
NAME=coserving LIMIT=360 check coserving --set coserving.profile_s=8 --set coserving.phase_s=7
keep
