# What no GPU has run to its end, alone on the card, the most important first. At most 570 s.
. scripts/gpu_kit/env.sh
model
# The profile took 89 s on an H200; three starts of engines follow, of up to 55 s there and 75 s on an H100, and 50 s of phases.
NAME=coserving LIMIT=360 check coserving --set coserving.profile_s=8 --set coserving.phase_s=7
results
# What bounds an engine, and whether its model gains by a process of its own. Three engines start: it took over 110 s.
NAME=rate LIMIT=200 check rate
keep
