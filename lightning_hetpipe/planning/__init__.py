"""Measured layer times and the partition of layers into stages."""
