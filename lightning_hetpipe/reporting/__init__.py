"""What a run reports: metrics for the loggers and a summary for people."""
