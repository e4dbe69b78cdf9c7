"""gRPC, imported with its support of forks and its own log off, and the environment left as it was.

DataLoader's workers are forks that never use gRPC. Python's part of that support, which waits up to seconds for gRPC's
threads before each fork, is off by default; the core's part is on (grpcio 1.85) and complains on stderr at
each fork.

The log of gRPC's core goes to stderr, which is a person's terminal. By default it writes there, as they are, bytes that
anybody has sent who can connect, token or not: the debug text of a GOAWAY frame, once for each frame. Errors say
nothing that calls do not end with as well, and a stranger can have thousands of those written, too. So it is silent.

Both are read from the environment when gRPC is imported, and never again (grpcio 1.85). Where somebody else imported it
first, log and complaints stay; where somebody set a variable, they meant it: GRPC_VERBOSITY=INFO brings the log back.
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
