"""Import of gRPC with its fork support and its log off. The environment stays as it was.

Fork support is useless here, because forks (DataLoader's workers) never use gRPC. Its Python part, which waits up to
seconds before each fork, is off by default. Its core part is on (grpcio 1.85) and complains on stderr at each fork.

The log of gRPC's core goes to stderr. By default it repeats bytes of anybody who can connect, with or without token:
the debug text of each GOAWAY frame. Calls raise its errors anyway, and a stranger can cause thousands.

gRPC reads both variables only when it is first imported (grpcio 1.85). If it was imported before, log and complaints
stay. A variable that is already set is kept, so GRPC_VERBOSITY=INFO brings the log back.
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
