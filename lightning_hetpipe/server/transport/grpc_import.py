"""Import of gRPC with its support of forks and its own log off; the environment stays as it was.

DataLoader's workers are forks that never use gRPC. Python's part of that support, which waits up to seconds for gRPC's
threads before each fork, is off by default; the core's part is on (grpcio 1.85) and complains on stderr at
each fork.

The log of gRPC's core goes to stderr, and by default repeats bytes of anybody who can connect, with or without token:
the debug text of each GOAWAY frame. Its errors are those that calls end with, and a stranger can cause thousands.

Both are read from the environment when gRPC is imported, and never again (grpcio 1.85). If gRPC was imported before,
log and complaints stay; a variable that is set already is kept, so GRPC_VERBOSITY=INFO brings the log back.
"""

from __future__ import annotations

import os

_SWITCHES = {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}

_ours = {name: value for name, value in _SWITCHES.items() if name not in os.environ}
os.environ.update(_ours)
try:
    import grpc
finally:
    for _name in _ours:
        os.environ.pop(_name, None)

__all__ = ["grpc"]
