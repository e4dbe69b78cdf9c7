"""`python -m tests.parity.lightning_suite FOLDER [FILE ...]`: Lightning's own tests, plainly and under our strategy.

FOLDER is ``tests`` of Lightning's repository, at the release that is installed; its requirements are in
``requirements/pytorch/test.txt`` there. Printed are the tests that pass plainly and fail under our strategy, which the
environment chooses (``PL_TRAINER_STRATEGY``). Each of Lightning's files runs in a process of its own:

    python -m tests.parity.lightning_suite ../lightning/tests trainer loops/test_loops.py --reports /tmp/reports
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SUITE, PLUGIN = "tests_pytorch", "tests.parity.lightning_suite"
REPORT = "LIGHTNING_SUITE_REPORT"
ACCELERATOR = {"PL_TRAINER_ACCELERATOR": "cpu"}
WAYS = {"plain": ACCELERATOR, "ours": {**ACCELERATOR, "PL_TRAINER_STRATEGY": "hetpipe"}}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note down how a test has ended, as this module is a plugin of the processes that it starts."""
    if report.when != "call" and report.outcome == "passed":  # its process may end before its call does
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    error = "" if report.outcome != "failed" else str(crash.message if crash else report.longrepr)
    with open(os.environ[REPORT], "a") as file:
        file.write(json.dumps([report.nodeid, report.outcome, error]) + "\n")


def outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """Outcome and error of each test in a report; that of its first phase that did not pass."""
    found: dict[str, tuple[str, str]] = {}
    for line in report.read_text().splitlines() if report.exists() else ():
        test, outcome, error = json.loads(line)
        if found.get(test, ("passed", ""))[0] == "passed":
            found[test] = outcome, error
    return found


def files(suite: Path, wanted: list[str]) -> Iterator[str]:
    """Test files below the wanted files and folders of the suite."""
    for path in map(suite.joinpath, wanted or ["."]):
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            yield str(file.relative_to(suite))


def run(folder: Path, file: str, way: str, reports: Path, seconds: float) -> dict[str, tuple[str, str]]:
    """Outcomes of the tests of one file."""
    report = reports.resolve() / way / f"{file.replace(os.sep, '.')}.jsonl"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "PYTEST"))}
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    variables |= {**WAYS[way], REPORT: str(report), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", f"{SUITE}/{file}", "-p", "lightning_hetpipe", "-p", PLUGIN]
    command += ["-p", "no:cacheprovider", f"--timeout={seconds:g}", "--tb=short", "--color=no"]
    with open(report.with_suffix(".log"), "w") as log:
        subprocess.run(command, cwd=folder, env=variables, stdout=log, stderr=log)
    return outcomes(report)


def compare(folder: Path, wanted: list[str], reports: Path, seconds: float) -> tuple[int, dict[str, str]]:
    """Number of tests that pass plainly, and errors of those among them that do not under our strategy."""
    passed, lost = 0, {}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
        copies = {way: Path(scratch, way) for way in WAYS}  # the suite checks that tests leave no files in it
        for copy in copies.values():
            shutil.copytree(folder, copy / "tests")
            shutil.copy(folder.parent / "pyproject.toml", copy)
        for file in files(folder / SUITE, wanted):
            runs = {way: pool.submit(run, copies[way] / "tests", file, way, reports, seconds) for way in WAYS}
            plain, ours = runs["plain"].result(), runs["ours"].result()
            good = [test for test, (outcome, _) in plain.items() if outcome == "passed"]
            found = {test: ours.get(test, ("missing", "its process has ended")) for test in good}
            bad = {test: f"{outcome}: {error}" for test, (outcome, error) in found.items() if outcome != "passed"}
            print(f"{file}: {len(good)} pass plainly, {len(bad)} of them not under our strategy", flush=True)
            passed += len(good)
            lost.update(bad)
    return passed, lost


def main() -> None:
    """Compare, and print what is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", help=f"files and folders below {SUITE}; without them, all")
    parser.add_argument("--reports", type=Path, default=Path("lightning_suite"), help="folder for outcomes and output")
    parser.add_argument("--seconds", type=float, default=120, help="limit for one test")
    options = parser.parse_args()
    passed, lost = compare(options.folder.resolve(), options.files, options.reports, options.seconds)
    for test, error in lost.items():
        print(f"\n{test}\n    {error.strip()[:500]}")
    print(f"\n{passed} tests pass plainly; {len(lost)} of them not under our strategy")


if __name__ == "__main__":
    main()
