"""Features of runs, each an :class:`~lightning_hetpipe.run.lifecycle.Extension`, and their parts."""
