"""Builds the extension, once for all processes, into torch's folder of extensions."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("source")
FLAGS = ["-O1", "-g0", "-Wall"]


@cache
def missing() -> str | None:
    """Why the extension cannot be built here; None if it can."""
    compiler = cpp_extension.get_cxx_compiler()  # type: ignore[no-untyped-call]  # torch has no types here
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}), with which the test accelerator is built"
    _find_ninja()
    if not cpp_extension.is_ninja_available():
        return "there is no ninja, with which the test accelerator is built: pip install ninja"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "there are no headers of Python, with which the test accelerator is built"
    return None


@cache
def extension() -> ModuleType:
    """The extension, built if no process has done so from the same sources. It takes a minute."""
    sources = sorted(SOURCE.iterdir())
    made_of = [torch.__version__, sys.version, *FLAGS, *(each.read_text() for each in sources)]
    name = f"testacc_{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()[:16]}"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root, "lightning_hetpipe", name)
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}.so"
    with (folder / "building").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which a process that is killed lets go of
        if not (folder / "built").exists():
            (folder / "lock").unlink(missing_ok=True)  # torch's own, which it does not
            _find_ninja()
            code = [str(each) for each in sources if each.suffix == ".cpp"]
            built: ModuleType = cpp_extension.load(
                name, code, extra_cflags=FLAGS, build_directory=str(folder), is_python_module=True
            )
            (folder / "built").touch()
            return built
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find_ninja() -> None:
    """Have the ninja of this environment be found, also where the environment is not activated."""
    beside = Path(sys.executable).parent
    if shutil.which("ninja") is None and (beside / "ninja").exists():
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ['PATH']}"
