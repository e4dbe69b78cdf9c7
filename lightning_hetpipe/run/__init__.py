"""Runs of Lightning's loops with a pipeline: the life of a minibatch, its driver, and the features that extend it."""
