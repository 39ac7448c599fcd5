"""Running experiments: preparing, the round loop, checkpoints, resuming, several runs."""
