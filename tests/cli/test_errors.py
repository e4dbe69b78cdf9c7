"""A bug ends in its traceback and exit code 1, a signal in its own code; errors while training name the setting."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_hetpipe.cli.entry import report
from lightning_hetpipe.cli.hetpipe_train import PROGRAM
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.server_process import ServerLost
from lightning_hetpipe.server.process.waits import ServersSilent, ServersUnheard
from tests.cli.conftest import Ends, Train
from tests.support.marks import quick

MINE = ["--config-dir", "mine", "experiment=mine"]


def test_an_error_begins_on_a_line_of_its_own(ends: Ends) -> None:
    """Not behind a progress bar, and no bar is drawn after it."""
    output, error = ends(2, *MINE, "strategy.stages=50")
    assert "Epoch 0" in output
    said, hint = error.splitlines()[-2:]
    assert said.startswith("hetpipe-train: strategy.stages=50 is more than the 3 layers")
    assert "set strategy.stages to at most 3" in said
    assert hint == "(HYDRA_FULL_ERROR=1 shows where it was raised.)"


@quick("trainer.enable_checkpointing=false-.ckpt")
@pytest.mark.parametrize(
    ("switch", "missing"),
    [
        ("trainer.enable_progress_bar=false", "Epoch 0"),
        ("trainer.logger=false", "tensorboard --logdir"),
        ("trainer.enable_checkpointing=false", ".ckpt"),
    ],
)
def test_the_trainers_switches_hold_for_the_callbacks_of_the_configuration(
    train: Train, capsys: pytest.CaptureFixture[str], switch: str, missing: str
) -> None:
    """Lightning refuses them beside a callback of that kind, and the configuration lists one."""
    train(*MINE)
    assert missing in "".join(capsys.readouterr())
    train(*MINE, switch)
    shown = "".join(capsys.readouterr())
    assert "samples per second" in shown
    assert missing not in shown


@quick("output_dir=taken/x", "callbacks.model_checkpoint.dirpath=taken/x")
@pytest.mark.parametrize(
    "argument",
    [
        "output_dir=taken/x",
        "hydra.run.dir=taken/x",
        "logger.tensorboard.save_dir=taken/x",
        "callbacks.model_checkpoint.dirpath=taken/x",
    ],
)
def test_a_folder_that_cannot_be_made_is_named_with_its_setting(ends: Ends, folder: Path, argument: str) -> None:
    (folder / "taken").write_text("a file")
    _, error = ends(2, *MINE, argument)
    said = error.splitlines()[-2]
    assert argument.split("=")[0] in said
    assert "taken/x cannot be used (Not a directory" in said
    assert "Traceback" not in error


def test_a_file_that_the_users_code_does_not_find_is_named_with_its_setting(ends: Ends, folder: Path) -> None:
    """Only where the setting says that very path: another one's error keeps its traceback."""
    (folder / "files.py").write_text(
        "from pathlib import Path\n"
        "import users_model\n\n\n"
        "class Data(users_model.Data):\n"
        "    def __init__(self, path, name=''):\n"
        "        Path(path, name).read_text()\n"
    )
    _, error = ends(2, *MINE, "data._target_=files.Data", "data.path=nowhere.txt")
    assert "hetpipe-train: data.path=nowhere.txt cannot be used (No such file or directory" in error
    _, error = ends(1, *MINE, "data._target_=files.Data", "data.path=mine", "data.name=nowhere.txt")
    assert "files.py" in error


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# @package _global_\nmodel: [x\nseed: 3\n", "line 3"),
        ("# @package _global_\nseed: 3\nseed: 4\n", "found duplicate key seed in"),
        (
            "model:\n  width: 3\n",
            "experiment.model is not read there; if a file of yours sets it, begin that file with",
        ),
        ("", "experiment is not read there; if a file of yours sets it, begin that file with the line '# @package"),
    ],
)
def test_a_users_file_that_cannot_be_read_is_one_sentence(ends: Ends, folder: Path, text: str, said: str) -> None:
    (folder / "mine" / "experiment" / "mine.yaml").write_text(text)
    _, error = ends(2, *MINE)
    assert said in error
    assert "Traceback" not in error


def test_barebones_leaves_out_what_it_excludes(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning alone refuses the logger, the callbacks and the logging interval, which the configuration sets."""
    train(*MINE, "trainer.barebones=true")
    shown = "".join(capsys.readouterr())
    assert "samples per second" in shown
    assert "Epoch 0" not in shown


def test_what_lightning_finds_out_while_it_trains_is_one_sentence(ends: Ends) -> None:
    stop = "callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"
    _, error = ends(2, *MINE, stop, "callbacks.stop.monitor=val_los")
    assert "hetpipe-train: callbacks.stop.monitor=val_los: Early stopping conditioned on metric" in error
    assert "Traceback" not in error


def test_the_whole_error_is_shown_on_request(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SettingError, match=r"did you mean strategy\.in_flight"):
        train("strategy.in_fligt=6")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.fails=2", 'raise ValueError("a bug in training_step")'),
        ("model.refuses=true", 'raise ValueError("a bug in __init__")'),
    ],
)
def test_a_bug_of_the_users_shows_its_own_traceback(ends: Ends, override: str, line: str) -> None:
    _, error = ends(1, *MINE, override)
    assert line in error
    assert "users_model.py" in error
    assert "/hydra/" not in error
    assert "HYDRA_FULL_ERROR" not in error


def test_an_import_that_fails_in_the_users_file_shows_its_line(ends: Ends, folder: Path) -> None:
    (folder / "users_model.py").write_text("import not_installed_at_all\n")
    _, error = ends(1, *MINE)
    assert 'users_model.py", line 1' in error


@pytest.fixture
def sigint() -> Iterator[None]:
    """Ctrl-C works afterwards: Lightning ignores it once it was pressed."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_while_it_trains(ends: Ends) -> None:
    _, error = ends(130, *MINE, f"model.signal={int(signal.SIGINT)}")
    assert "hetpipe-train: interrupted." in error
    assert "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_while_it_trains_ends_the_process_with_its_code(
    folder: Path, number: int, code: int, said: str
) -> None:
    command = [sys.executable, "-m", "lightning_hetpipe.cli.hetpipe_train", *MINE, f"model.signal={int(number)}"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    assert run.returncode == code, run.stderr
    assert f"hetpipe-train: {said}." in run.stderr
    assert "Traceback" not in run.stderr


def test_ctrl_c_before_it_trains_ends_with_130(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_hetpipe.cli.config_checks.check", interrupted)
    _, error = ends(130)
    assert error == "\nhetpipe-train: interrupted.\n"


def test_servers_at_a_wrong_address_are_one_line(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a traceback, as of a bug."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    # All Trainers of a program meet at the same servers; later tests of this process have others.
    monkeypatch.setattr("lightning_hetpipe.workers.program_group._group", None)
    nobody = [
        "trainer.num_nodes=2",
        "strategy.wsp.servers=['127.0.0.1:1']",
        "strategy.timeout=0.3",
        "strategy.wsp.lease=0.3",
    ]
    _, error = ends(2, *MINE, *nobody)
    assert "hetpipe-train: strategy.wsp.servers=['127.0.0.1:1'] does not answer (VW 1, in state 'hello', has" in error
    assert "the server at 127.0.0.1:1 cannot be reached" in error
    assert "give the address of one that runs" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("kind", [ServersSilent, ServersUnheard, ServerLost])
def test_servers_that_are_gone_are_one_line(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    """The place at which the program waited explains nothing."""
    error = kind("VW 0 has waited\nfor a server")
    assert report(error, PROGRAM) == 1
    assert capsys.readouterr().err == "hetpipe-train: VW 0 has waited for a server\n"
