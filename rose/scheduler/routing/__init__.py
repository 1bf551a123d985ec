"""Which worker takes a turn: a file per policy. Policies ask the fleet, in O(log workers), and
change nothing."""
