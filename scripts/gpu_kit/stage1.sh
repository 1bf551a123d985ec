# The checks that must have the card for themselves, because their times count. At most 470 s.
. scripts/gpu_kit/env.sh
NAME=machine LIMIT=150 check machine pool micro
NAME=coserving LIMIT=290 check profile coserving
keep
