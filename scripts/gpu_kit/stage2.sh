# The checks that only have to work, side by side: their speeds are floors. At most 260 s.
. scripts/gpu_kit/env.sh
sed -i 's|f"rollout.gpu_memory_utilization={sizes.utilization}",|"rollout.gpu_memory_utilization=0.05", "rollout.kv_cache_gib=4",|' tests/gpu/engine.py
sed -i 's|"rollout.gpu_memory_utilization=0.5",|"rollout.gpu_memory_utilization=0.05", "rollout.kv_cache_gib=4",|' tests/gpu/jobs.py
export LIMIT=240 LINES_SHOWN=12
NAME=trainer check trainer & NAME=lora check lora & NAME=drafts check drafts & NAME=mixture check mixture & wait
for one in trainer lora drafts mixture; do echo "== $one"; grep -E "^$one|FAILED|->|Error" $OUT/$one.log | tail -12; done
results
