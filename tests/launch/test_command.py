"""The command that runs a program once more."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.launch import command
from lightning_hetpipe.launch.command import Command, this_program


def main_module(file: str | None, spec: str | None) -> ModuleType:
    module = ModuleType("__main__")
    module.__spec__ = None if spec is None else ModuleSpec(spec, None)
    if file is not None:
        module.__file__ = file
    return module


@pytest.mark.parametrize(
    ("original", "file", "spec", "expected"),
    [
        ("train.py a b=c", "/home/train.py", None, "/home/train.py a b=c"),
        ("-O train.py -m a", "/home/train.py", None, "-O /home/train.py -m a"),
        ("-X dev -Wignore -u train.py", "/home/train.py", None, "-X dev -Wignore -u /home/train.py"),
        ("-uX dev train.py", "/home/train.py", None, "-uX dev /home/train.py"),
        ("--check-hash-based-pycs always train.py a", "/t/train.py", None,
         "--check-hash-based-pycs always /t/train.py a"),
        ("-m package.train a", "/home/package/train.py", "package.train", "-m package.train a"),
        ("-mpackage a", "/home/package/__main__.py", "package.__main__", "-m package a"),
        ("-BIm package a", "/home/package/__main__.py", "package.__main__", "-BI -m package a"),
        ("/home/folder a", "/home/folder/__main__.py", "__main__", "/home/folder a"),
        ("-c code a", None, None, "-c code a"),
        ("/bin/hetpipe-train a", "/bin/hetpipe-train", None, "/bin/hetpipe-train a"),
        # A debugger, or the like, runs the program; a child runs without.
        ("-B -m pdb train.py a", "/home/train.py", None, "-B /home/train.py seen by it"),
        ("/bin/coverage run -m package.train", "/home/package/train.py", "package.train",
         "-m package.train seen by it"),
    ],
)  # fmt: skip
def test_the_command_of_a_program(
    monkeypatch: pytest.MonkeyPatch, original: str, file: str | None, spec: str | None, expected: str
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *original.split()])
    monkeypatch.setattr(sys, "argv", ["whatever", "seen", "by", "it"])
    monkeypatch.setitem(sys.modules, "__main__", main_module(file, spec))
    assert this_program() == Command([sys.executable, *expected.split()], command._START, None)


@pytest.mark.parametrize("original", [["-"], [], ["-B"]])
def test_a_program_from_standard_input_is_refused(monkeypatch: pytest.MonkeyPatch, original: list[str]) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *original])
    monkeypatch.setitem(sys.modules, "__main__", main_module(None, None))
    with pytest.raises(SettingError, match="came through standard input; save it as a file and run that"):
        this_program()


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ("-m a=1,2 +b=3 ~c --config-dir d=e", "--config-dir d=e"),
        ("--multirun -cn other ++a.b=1 group=x", "-cn other"),
        ("--multi --config-name=other --verbose", "--config-name=other --verbose"),
        ("positional hydra/launcher=joblib", "positional"),
    ],
)
def test_what_a_child_keeps_of_a_command_line(arguments: str, kept: str) -> None:
    assert command._options(arguments.split()) == kept.split()


@given(st.text(st.sampled_from("ab '\"\\,=[]:{}()"), min_size=1))
def test_hydra_reads_paths_as_they_are(path: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"hydra.run.dir={command.quoted(path)}"])
    assert override.value() == path


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("hydra.mode=MULTIRUN", True),
        ("hydra.run.dir=x", True),
        ("hydra.sweeper.n_trials=3", True),
        ("hydra/launcher=joblib", True),
        ("~hydra.output_subdir", True),
        ("hydra/job_logging=disabled", True),
        ("hydra.job.chdir=true", False),
        ("+hydra.job.env_set.X=1", False),
        ("hydra.searchpath=[pkg://mine]", False),
        ("hydra.verbose=true", False),
    ],
)
def test_which_of_hydras_own_overrides_a_child_gets(override: str, ours: bool) -> None:
    assert (command._OURS.match(override) is not None) == ours
