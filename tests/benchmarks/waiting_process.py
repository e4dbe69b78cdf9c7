"""A process of a benchmark that imports next to nothing: it waits for those that were started with it, or fails."""

import sys

from benchmarks.harness import wait_for_others

if __name__ == "__main__":
    if sys.argv[1] == "fail":
        raise KeyError("a bug")
    wait_for_others()
