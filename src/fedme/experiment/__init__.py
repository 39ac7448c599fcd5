"""From a file to results: configuration, the round loop, checkpoints, records, tables."""
