"""Memory that tensors on the CPU have let go of, kept in this process for the next ones."""

import torch

LARGEST_LEARNED = 2**25 - 2**16
"""Bytes of the largest allocation from which glibc learns; measured: 32 MiB less what it adds of its own."""


def keep_freed_memory() -> None:
    """Have the C library keep freed memory, rather than give it back to the system after each minibatch.

    By default a thread's free memory of more than twice the largest block that was mapped alone goes back. A stage
    frees all activations of a minibatch at once, and each page of the next minibatch then costs a fault: a fifth of
    the time of small convolutions. To free one large block teaches glibc to keep up to 64 MiB for each of its arenas
    (mallopt(3), M_MMAP_THRESHOLD); other C libraries just free it.
    """
    torch.empty(LARGEST_LEARNED, dtype=torch.uint8)
