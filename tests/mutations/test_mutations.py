"""Mutation check: with one rule of the package broken, the tests that are named for it must fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.mutations.table import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_hetpipe"
COPIED = (PACKAGE, "tests", "conf", "benchmarks", "docs", "README.md", "pyproject.toml")
LAWS = {f"L{number}" for number in range(1, 11)}


def test_every_law_and_twenty_rules_have_a_mutation() -> None:
    assert {mutation.rule for mutation in MUTATIONS} >= LAWS
    assert len(MUTATIONS) >= len(LAWS) + 20
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_mutations_find_what_they_break() -> None:
    """Changes of the package keep the table true: each fragment is there, once."""
    stale = []
    for mutation in MUTATIONS:
        file = ROOT / PACKAGE / mutation.file
        times = file.read_text().count(mutation.fragment) if file.is_file() else 0
        if times != 1:
            stale.append(f"{mutation.name} ({mutation.file}): its fragment occurs {times} times")
    assert not stale, "\n".join(stale)


def test_mutations_name_tests_that_are_there() -> None:
    paths = {argument for mutation in MUTATIONS for argument in mutation.tests if argument.startswith("tests/")}
    assert not [path for path in sorted(paths) if not (ROOT / path.partition("::")[0]).exists()]


@pytest.fixture(scope="module")
def pytest_runs() -> Iterator[Callable[..., int]]:
    """Runs pytest in a folder; gives its exit status."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["COLUMNS"] = "500"  # else pytest cuts short why a test has failed
    forking = Path(__file__).with_name("forking.py")
    command = [sys.executable, str(forking)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, env=environment) as process:
        told, heard = process.stdin, process.stdout
        assert told is not None
        assert heard is not None

        def run(folder: Path, arguments: Sequence[str], output: Path) -> int:
            print(json.dumps([str(folder), arguments, str(output)]), file=told, flush=True)
            while (answer := json.loads(heard.readline()))[0] != str(output):
                pass  # of a run that a timeout has cut off
            return int(answer[1])

        yield run
        told.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.rule}: {mutation.name}")
def test_tests_notice(
    mutation: Mutation,
    pytest_runs: Callable[..., int],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """A copy of the package is broken, never the checkout."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in COPIED:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
    file = copy / PACKAGE / mutation.file
    before, after = file.read_text().split(mutation.fragment)
    file.write_text(before + mutation.replacement + after)

    seconds = 60 if mutation.hangs else 900
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", f"--timeout={seconds}", "-m", "not slow"]
    output = tmp_path / "output"
    status = pytest_runs(copy, [*options, *mutation.tests], output)
    said = output.read_text()
    shutil.rmtree(copy)

    assert status == 1, f"nobody noticed that {mutation.name} (exit status {status}):\n{said[-4000:]}"
    noticed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - (.*))?$", said, re.MULTILINE)
    assert noticed is not None, said[-4000:]
    ran_out = "Timeout" in (noticed.group(2) or "")
    assert mutation.hangs or not ran_out, f"a busy machine, or nobody, noticed that {mutation.name}:\n{said[-4000:]}"
    record_property("mutation", [mutation.rule, mutation.name, noticed.group(1)])
