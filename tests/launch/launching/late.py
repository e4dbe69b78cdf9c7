"""The program of ``obedient``, whose children wait at two moments: while they import, and once all else has run.

Each tells the test so at a connection of its own, and goes on when the test says that nothing more will be told.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import socket
import sys


def wait(where: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    told = {"number": int(os.environ["LOCAL_RANK"]), "pid": os.getpid(), where: True, "frozen": gc.get_freeze_count()}
    connection.sendall(json.dumps(told).encode() + b"\n")
    connection.recv(1)


if "LOCAL_RANK" in os.environ:
    if "imports" in sys.argv:
        wait("imports")
    if "ends" in sys.argv:
        atexit.register(wait, "ends")  # first, and so run last: as what Python still does after that


if __name__ == "__main__":
    from tests.launch.launching.obedient import Obedient  # this is what takes long

    Obedient(sys.argv[1]).obey()
