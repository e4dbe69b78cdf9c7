"""Runs pytest over and over, in forks of a process that has imported torch and Lightning, but nothing of ours.

One line of JSON in (folder, arguments of pytest, file for its output), one line out: that file, and its exit status.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import lightning.pytorch  # noqa: F401
import pytest
import torchmetrics  # noqa: F401


def run(folder: str, arguments: list[str], output: str) -> int:
    """The exit status of pytest with ``arguments`` in ``folder``, which holds the package and its tests."""
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = sys.path[0] = folder
    return int(pytest.main(arguments))


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                status = run(*json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([json.loads(line)[2], status]), flush=True)


if __name__ == "__main__":
    main()
