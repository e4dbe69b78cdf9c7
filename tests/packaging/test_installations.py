"""Installed as people install it, the package runs hetpipe-train outside its checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import forks

CHECKOUT = Path(__file__).parents[2]
SOURCES = ["pyproject.toml", "README.md", "LICENSE", "lightning_hetpipe", "conf"]
SHORT = ["trainer.max_epochs=1", "trainer.limit_train_batches=4", "callbacks.progress_bar=null"]
SHORT += ["trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.enable_progress_bar=false"]
SHORT += ["model.blocks=1", "model.width=4"]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy, so that what a build leaves behind stays out of the real one."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in SOURCES:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """The `bin` folder of a fresh virtual environment that sees this one's libraries, but not its hetpipe-train."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    libraries = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    # A .pth file adds folders without reading the .pth files inside them: an editable install there stays behind.
    Path(sysconfig.get_path("purelib", "venv", vars=paths), "libraries.pth").write_text("\n".join(libraries))
    return Path(sysconfig.get_path("scripts", "venv", vars=paths))


def build(checkout: Path, kind: str) -> Path:
    """The sdist or wheel that a build of `checkout` makes, with this environment's setuptools."""
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", "built", cwd=checkout)
    (made,) = (checkout / "built").iterdir()
    return made


def editable(checkout: Path) -> list[str]:
    return ["--editable", str(checkout)]


def wheel(checkout: Path) -> list[str]:
    return [str(build(checkout, "wheel"))]


def sdist(checkout: Path) -> list[str]:
    """pip makes a wheel of it, from nothing but what the sdist holds."""
    return [str(build(checkout, "sdist"))]


@pytest.mark.slow
@pytest.mark.parametrize("form", [editable, wheel, sdist])
def test_hetpipe_train_runs_from_an_installation(
    form: Callable[[Path], list[str]], checkout: Path, environment: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    run(environment / "python", "-m", "pip", "install", *flags, *form(checkout), cwd=elsewhere)
    if form is not editable:
        shutil.rmtree(checkout)
    where = run(
        environment / "python", "-c", "import lightning_hetpipe; print(lightning_hetpipe.__file__)", cwd=elsewhere
    )
    assert Path(where.strip()).is_relative_to(checkout if form is editable else environment.parent)
    said = run(environment / "hetpipe-train", *SHORT, cwd=elsewhere)
    assert "Trained as a pipeline of 3 stages" in said
    assert list(elsewhere.glob("outputs/*/*/checkpoints/*.ckpt"))


SCRIPT = """
import sys
from importlib.metadata import entry_points
import lightning_hetpipe
assert "lightning" not in sys.modules
assert lightning_hetpipe.__file__.startswith(sys.path[1])
(script,) = entry_points(group="console_scripts", name="hetpipe-train")
script.load()()
"""


def test_the_wheel_holds_what_is_needed_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    """Code, configuration, types, and a script that trains where there is only what pip takes from the wheel."""
    wheel = zipfile.ZipFile(build(checkout, "wheel"))
    names = set(wheel.namelist())
    held = {name for name in names if ".dist-info/" not in name}
    code = {str(path.relative_to(checkout)) for path in (checkout / "lightning_hetpipe").rglob("*.py")}
    settings = {f"lightning_hetpipe/{path.relative_to(checkout)}" for path in (checkout / "conf").rglob("*.yaml")}
    assert settings
    others = {"conf/__init__.py", "planning/model/gpus.json", "py.typed"}
    assert held == code | settings | {f"lightning_hetpipe/{name}" for name in others}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    shutil.rmtree(checkout)
    (installed := tmp_path / "installed").mkdir()
    wheel.extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    ran = forks.run("-c", SCRIPT, *SHORT, loaded="libraries", cwd=tmp_path, environment=environment)
    assert ran.returncode == 0, ran.stderr
    assert "Trained as a pipeline of 3 stages" in ran.stdout
    assert list(tmp_path.glob("outputs/*/*/checkpoints/*.ckpt"))


def test_the_sdist_holds_what_a_build_needs(checkout: Path) -> None:
    with tarfile.open(build(checkout, "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "conf/train.yaml", "conf/model/gpt.yaml"} <= names
    assert "lightning_hetpipe/planning/model/gpus.json" in names
