"""Reports of a run: metrics for loggers, timelines, and a summary for people."""
