"""What a training step consumes: a file per policy. Policies know events, groups' names and nothing
of workers."""
