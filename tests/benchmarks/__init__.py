"""Tests of what the benchmarks' figures rest on; no test looks at how long something took."""
