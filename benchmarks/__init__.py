"""Benchmarks: side by side, in interleaved rounds, against the plain Trainer and against peers. See README.md."""
