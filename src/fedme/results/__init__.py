"""What a run measured: records, summaries, tables, loggers."""
