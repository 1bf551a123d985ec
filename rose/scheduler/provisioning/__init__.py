"""Which capacity, when: a file per policy. Policies read the cluster and answer with actions."""
