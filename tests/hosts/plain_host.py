"""Program of hetpipe-host, where its command is not installed: python -m tests.hosts.plain_host address=127.0.0.1:0"""

from lightning_hetpipe.cli.hetpipe_server import host_main

if __name__ == "__main__":
    host_main()
