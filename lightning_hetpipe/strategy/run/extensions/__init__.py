"""Features of runs, each an :class:`~lightning_hetpipe.strategy.run.lifecycle.Extension`, and what they are made of."""
