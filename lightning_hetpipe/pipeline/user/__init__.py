"""User code in the pipeline: runner pool, lock, sections, and the view of the parameters."""
