"""Allocation: which devices of a cluster make which virtual worker, and where parameters lie."""
