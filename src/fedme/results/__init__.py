"""The results of a run: records, summaries, tables, loggers."""
