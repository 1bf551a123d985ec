"""Which waiting turn goes first: a file per policy. Policies read the cluster and change
nothing."""
