"""gRPC, imported with its support of forks off, and the environment left as it was.

DataLoader's workers are forks that never use gRPC. Python's part of that support, which waits up to seconds for gRPC's
threads before each fork, is off by default; the core's part is on (grpcio 1.85) and complains on stderr at
each fork. Both read this variable when gRPC is imported. Where somebody else imported it first, the complaint stays;
where somebody set the variable, they meant it.
"""

from __future__ import annotations

import os

_SWITCH = "GRPC_ENABLE_FORK_SUPPORT"

_untouched = _SWITCH in os.environ
if not _untouched:
    os.environ[_SWITCH] = "0"
try:
    import grpc
finally:
    if not _untouched:
        os.environ.pop(_SWITCH, None)

__all__ = ["grpc"]
