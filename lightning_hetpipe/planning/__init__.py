"""Planning: measured layer times, and the partition of layers into stages."""
