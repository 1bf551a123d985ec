# The checks that only have to work, side by side: their speeds are floors. At most 260 s.
. scripts/gpu_kit/env.sh
model
export LIMIT=240 LINES_SHOWN=12
NAME=trainer check trainer & NAME=lora check lora --set lora.kv_gib=4 & NAME=drafts check drafts --set drafts.kv_gib=4 & NAME=mixture check mixture --set mixture.kv_gib=4 & wait
for one in trainer lora drafts mixture; do echo "== $one"; grep -E "^$one|FAILED|->|Error" $OUT/$one.log | tail -12; done
results
