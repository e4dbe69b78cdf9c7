"""Memory that tensors have let go of stays in the process."""

import sys

import pytest

from tests.support import forks

PROGRAM = """
import resource, sys, threading
import torch
from lightning_hetpipe.pipeline.memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt

def minibatches():
    for number in range(8):
        if number == 5:
            before = faults()
        activations = [torch.ones(2**18) for _ in range(30)]
        while activations:
            activations.pop()
    print(faults() - before)

torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_freed_memory()
thread = threading.Thread(target=minibatches)
thread.start()
thread.join()
"""
"""Prints how many pages the last three of eight minibatches of 30 MiB fault in, in a thread, as a stage's do."""


def faults(how: str) -> int:
    ran = forks.run("-c", PROGRAM, how, loaded="libraries")
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="page faults of one thread are counted by Linux alone")
def test_minibatches_find_the_memory_of_those_before() -> None:
    given_back = faults("given back")
    if given_back < 1000:
        pytest.skip("this C library keeps freed memory by itself")
    assert faults("kept") < given_back / 10
