"""Program of hetpipe-host that may have few descriptors: python -m tests.hosts.limited_host address=127.0.0.1:0"""

from __future__ import annotations

import resource

from lightning_hetpipe.cli.hetpipe_server import host_main

DESCRIPTORS = 64


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    host_main()
