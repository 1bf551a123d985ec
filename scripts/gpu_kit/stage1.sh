# The checks that must have the card for themselves, because their times count. At most 470 s.
. scripts/gpu_kit/env.sh
NAME=machine LIMIT=60 check machine pool
timeout 90 python3 scripts/gpu_kit/micro.py > $OUT/micro.csv 2> $OUT/micro.err; cat $OUT/micro.csv; tail -5 $OUT/micro.err
NAME=coserving LIMIT=290 check profile coserving
keep
