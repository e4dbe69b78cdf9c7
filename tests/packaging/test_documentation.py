"""README.md and docs/: their programs run, their commands compose, their links and paths lead somewhere."""

from __future__ import annotations

import pkgutil
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

import lightning_hetpipe
from lightning_hetpipe.cli.hetpipe_train import main
from tests.packaging import settings_table
from tests.support.composing import compose_once

CHECKOUT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(CHECKOUT)): page.read_text()
    for page in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").rglob("*.md")))
}
GUIDE = PAGES["docs/getting-started.md"]
USERS = ("mine/", "outputs/", "site/")
"""Folders that pages name although they are no part of the repository."""


@pytest.fixture
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compose_once(monkeypatch)


def files_of(text: str) -> dict[str, str]:
    """The code blocks of a page that are files: those that begin with a comment that is a path.

    Hydra wants its own comment, `# @package`, above it.
    """
    found = re.findall(r"^```\w+\n((?:# @.*\n)?# (\S+\.(?:py|yaml))\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    return {path: code for code, path in found}


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub and mkdocs give to a page's headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.usefixtures("composed_once")
def test_a_model_of_ones_own_trains_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For two of its five epochs."""
    files = files_of(GUIDE)
    assert set(files) == {"my_model.py", "mine/experiment/mine.yaml"}
    for path, code in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(code)
    (command,) = re.findall(r"^    hetpipe-train (--config-dir .*)$", GUIDE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # the process's logging stays as it is
    monkeypatch.setattr(sys, "argv", ["hetpipe-train", *command.split(), *quiet, "trainer.max_epochs=2"])
    main()
    del sys.modules["my_model"]
    said = capsys.readouterr().out
    assert "Trained as a pipeline of 2 stages, 3 minibatches in flight" in said
    accuracy = re.search(r"test accuracy +([\d.]+)%", said)
    assert accuracy is not None
    assert float(accuracy[1]) > 80  # two thirds of the points would be right by always saying no


def commands() -> list[str]:
    """The commands on pages that no other test runs, without those that need files of the user's."""
    pages = ("README.md", "docs/getting-started.md", "docs/virtual-workers.md")
    found = [command for page in pages for command in re.findall(r"^    (hetpipe-.*)$", PAGES[page], re.MULTILINE)]
    return [command for command in found if "..." not in command and "--config-dir" not in command]


@pytest.mark.parametrize("command", commands())
@pytest.mark.usefixtures("composed_once")
def test_the_commands_compose(command: str) -> None:
    program, *arguments = shlex.split(command, comments=True)
    # Of a sweep's values the first; a list in brackets is one value.
    overrides = [re.sub(r"(=[^\[]*?),.*", r"\1", argument) for argument in arguments if not argument.startswith("-")]
    with initialize_config_module("lightning_hetpipe.conf", version_base="1.3"):
        compose(program.removeprefix("hetpipe-"), overrides)


@pytest.mark.parametrize("page", PAGES)
def test_no_page_holds_both_sides_of_a_merge(page: str) -> None:
    assert not re.search(r"^(<{7} |>{7} |={7}$)", PAGES[page], re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_are_python(page: str) -> None:
    for code in re.findall(r"^```python\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL):
        compile(code, page, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_the_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(((?!http)[^)]+)\)", PAGES[page]):
        path, _, anchor = link.partition("#")
        target = (CHECKOUT / page).parent / path if path else CHECKOUT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target.read_text()), link
        # What is outside of docs/ is no part of the site.
        assert page == "README.md" or target.resolve().is_relative_to(CHECKOUT / "docs"), link


@pytest.mark.parametrize("page", PAGES)
def test_the_paths_exist(page: str) -> None:
    """Paths in backticks: from the repository's root, from the package, or from tests/."""
    for path in re.findall(r"`([\w./-]+?)(?:::\w+)?`", PAGES[page]):
        named = re.search(r"\.(?:py|md|toml|proto)$|/$", path) and "/" in path
        if (named or path.startswith("tests/")) and not path.startswith(USERS):
            roots = (CHECKOUT, CHECKOUT / "lightning_hetpipe", CHECKOUT / "tests")
            assert any((root / path).exists() for root in roots), path


def test_the_tables_of_settings_are_those_of_the_declarations() -> None:
    """``python -m tests.packaging.settings_table`` writes them."""
    assert settings_table.TABLE.findall(PAGES["docs/settings.md"]) == [
        *map(settings_table.table, settings_table.OWNERS)
    ]


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (CHECKOUT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {f"docs/{page}" for page in listed} == set(PAGES) - {"README.md"}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason='needs mkdocs: pip install ".[docs]", or make docs')
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference" / "public" / "index.html").read_text()
    assert "in_flight" in reference
    assert ":func:" not in reference


def test_the_reference_names_what_exists() -> None:
    names = re.findall(r"^::: (\S+)$", "\n".join(PAGES.values()), re.MULTILINE)
    assert {f"lightning_hetpipe.{name}" for name in lightning_hetpipe.__all__} <= set(names)
    for name in names:
        assert pkgutil.resolve_name(name) is not None
