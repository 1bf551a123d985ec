# Sourced by the stages in the repository's root on the GPU machine. $OUT is the folder for results.
export PYTHONUNBUFFERED=1 KIT=/tmp/kit VLLM_CACHE_ROOT=/tmp/cache/vllm TRITON_CACHE_DIR=/tmp/cache/triton TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor
if [ ! -d $KIT ]; then
    mkdir -p $KIT /tmp/cache && tar xJf .kit/kit.tar.xz -C $KIT || exit 1
    cat .kit/cache.tar.xz.* 2>/dev/null | tar xJf - -C /tmp/cache 2>/dev/null || true  # of an earlier run: engines start in a third of the time
fi
[ ! -f .kit-moe/kit.tar.xz ] || [ -f $KIT/vllm/_moe_C_stable_libtorch.abi3.so ] || tar xJf .kit-moe/kit.tar.xz -C $KIT
export PYTHONPATH=$PWD:$KIT PATH=$KIT/bin:$PATH LD_LIBRARY_PATH=$KIT/lib:${LD_LIBRARY_PATH:-}
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
# At most eight files come back, of 16 MiB each: results in one archive, caches in parts of 15 MiB.
keep() {
    tar cf - -C /tmp/cache . | xz -T0 -3 | split -b 15m - $OUT/cache.tar.xz.
    results
}
# The archive has the results of earlier checks on this machine, too.
results() {
    mkdir -p /tmp/results/scratch
    for f in /tmp/rose-gpu-check-*/*.log; do [ -f "$f" ] && tail -c 200000 "$f" > /tmp/results/scratch/$(basename $(dirname $f))-$(basename $f); done
    cp $OUT/*.json $OUT/*.log /tmp/results 2>/dev/null
    tar czf $OUT/results.tar.gz -C /tmp/results . && rm -f $OUT/*.json $OUT/*.log
}
# Makes the model of all checks once, in 40 s: each `check` would make one of its own.
model() {
    [ -d /tmp/model/model ] || { mkdir -p /tmp/model && python3 scripts/gpu_kit/make_model.py /tmp/model > /tmp/model/log 2>&1; }
    export MADE="--model /tmp/model/model"
}
# A call on the machine ends after 600 s, of which the archives need 30: no check may take more than what is left.
# MOST=N bash scripts/gpu_kit/stage1.sh bounds a shorter call.
check() {
    local most=${LIMIT:-300} left=$((${MOST:-600} - 30 - SECONDS))
    echo "== $*"
    [ $left -gt 0 ] || { echo "no time left"; return; }
    timeout $((most < left ? most : left)) python3 scripts/gpu_check.py --json $OUT/$NAME.json $MADE "$@" 2>&1 | tee $OUT/$NAME.log | tail -${LINES_SHOWN:-45}
}
