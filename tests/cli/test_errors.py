"""A wrong setting ends in one sentence and exit code 2, a bug in its traceback and 1, a signal in its own code."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_hetpipe.cli.error_report import report
from lightning_hetpipe.errors import SettingError
from lightning_hetpipe.server.process.client import ServersSilent, ServersUnheard
from lightning_hetpipe.server.process.supervisor import ServerLost
from tests.cli.conftest import Ends, Train

MINE = ["--config-dir", "mine", "experiment=mine"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["strategy.in_fligt=6"], "strategy.in_fligt is not a setting; did you mean strategy.in_flight?"),
        (["+strategy.in_fligt=6"], "strategy.in_fligt is not a setting; did you mean strategy.in_flight?"),
        (["experiment=gptt"], "experiment=gptt does not exist among digits, gpt; did you mean experiment=gpt?"),
        (["experiment=zzz"], "experiment=zzz does not exist among digits, gpt; choose one of them."),
        (["modle=resnet"], "modle is not a setting; did you mean model?"),
        (["sead=3"], "sead is not a setting; did you mean seed?"),
        (["experimnt=gpt"], "experimnt is not a setting; did you mean experiment?"),
        (["model.width=${nowhere}"], "model.width: Interpolation key 'nowhere' not found"),
        (["model._target_=no_such.Model"], "model._target_=no_such.Model cannot be found"),
        (["strategy.stages=[1"], "strategy.stages=[1 cannot be read; write section.key=value"),
        (["--config-dir", "nowhere"], "Additional config directory"),
        (["experiment=null"], "experiment=null names no option of experiment; choose one of those that"),
        (["model=3"], "model=3 names no option of model; choose one of those that hetpipe-train --help lists."),
        (["strategy.stages=1,2"], "strategy.stages=1,2 is several values; add -m to run with each of them, or write"),
        (["model=gpt"], "model.context: Interpolation key 'data.context' not found; choose experiment=gpt, which"),
        (["+model=gpt"], "model is chosen twice; write model=gpt without a +"),
        (["trainer.logger=[]"], "trainer.logger=[] cannot replace a whole section; write '~trainer.logger'"),
        (["hydra.job.num=abc"], "hydra.job.num=abc is refused: Value 'abc' of type 'str' could not be converted"),
        (["hydra.foo=3"], "Could not override 'hydra.foo'. To append to your config use +hydra.foo=3"),
        (["~strategy.nothing"], "~strategy.nothing takes nothing away, as there is no strategy.nothing"),
        (["trainer.accelerator=abacus"], "trainer.accelerator=abacus: You selected an invalid accelerator name"),
        (["trainer.devices=-3"], "trainer.devices=-3: `devices` selected with `CPUAccelerator` should be an int > 0."),
        (["trainer.max_time=abc"], "trainer.max_time=abc: `Timer(duration='abc')` is not a valid duration."),
        (["trainer.max_time={days: 1, hoors: 2}"], "trainer: 'hoors' is an invalid keyword argument"),
        (["trainer.strategy=fsdp"], "trainer.strategy=fsdp: The strategy `fsdp` requires a GPU accelerator"),
        (["trainer.logger=3"], "trainer.logger=3 must be a Logger or [a Logger, ...] or true or false or null."),
        (["trainer.callbacks.x._target_=torch.nn.Identity"], "trainer.callbacks.x._target_=torch.nn.Identity makes a"),
        (["trainer._target_=torch.nn.Identity"], "trainer._target_=torch.nn.Identity makes a torch.nn.modules.linear"),
        (["trainer.num_nodes=2"], "trainer.num_nodes=2 needs MASTER_ADDR and MASTER_PORT; set"),
        (["strategy.stages=0"], "strategy.stages=0 must be a whole number of at least 1, or 'auto'"),
        (["strategy.wsp.clock_distance=-1"], "strategy.wsp.clock_distance=-1 must be a whole number of at least 0"),
        (["strategy.wsp.clok_distance=1"], "strategy.wsp.clok_distance is not a setting; did you mean strategy.wsp.cl"),
        (["strategy.wsp.aggregate=avg"], "strategy.wsp.aggregate=avg is not known; use 'sum' or 'mean'"),
        (["strategy.wsp.lease=abc"], "strategy.wsp.lease=abc must be a timedelta or a number."),
        (["strategy.wsp.security={token: abc}"], "strategy.wsp.security.token stands in the configuration, where"),
        (["strategy.virtual_workers=2", "+strategy.wsp.security.ca=ca.pem"], "security.ca=ca.pem needs"),
        (
            ["strategy.wsp.servers=[nowhere]"],
            "strategy.wsp.servers=['nowhere'] holds 'nowhere', which is not host:port",
        ),
        (["strategy.virtual_workers=two"], "strategy.virtual_workers=two must be a whole number."),
        (
            ["strategy.compile=nothing"],
            "strategy.compile=nothing is no backend of torch.compile here; name one of aot_",
        ),
        (
            ["strategy.compile={fullgraph: true}"],
            "strategy.compile={'fullgraph': True} must be True or False, the name",
        ),
        (["trainer.max_epochs=abc"], "trainer.max_epochs=abc must be a whole number or null."),
        (["data.batch_size=abc"], "data.batch_size=abc must be a whole number."),
        (["data.batch_size=0"], "data.batch_size=0 must be at least 1"),
        (["experiment=gpt", "data.context=0"], "data.context=0 must be at least 1"),
        (["experiment=gpt", "model.heads=5"], "model.width=96 must be a multiple of model.heads=5"),
        (["strategy.stages=two"], "strategy.stages=two must be a whole number or 'auto' or [a whole number, ...]."),
        (["seed=abc"], "seed=abc must be a whole number or null."),
        (["ckpt_path=nowhere.ckpt"], "ckpt_path=nowhere.ckpt does not exist; give the path of a checkpoint"),
        (["seed=-1"], "seed=-1 must be from 0 to 4294967295, or null to draw one."),
        (["trainer.max_epochs=-5"], "trainer.max_epochs=-5: `max_epochs` must be a non-negative integer or -1."),
    ],
)
def test_a_wrong_setting_is_one_sentence(ends: Ends, arguments: list[str], said: str) -> None:
    _, error = ends(2, *arguments)
    assert error.startswith(f"hetpipe-train: {said}")
    assert error.splitlines()[1:] == ["(HYDRA_FULL_ERROR=1 shows where it was raised.)"]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("trainer.logger.save_dirr=x", "save_dirr is not a setting; did you mean trainer.logger.save_dir?"),
        (
            "trainer.logger.foo=x",
            "foo is not a setting; lightning.pytorch.loggers.TensorBoardLogger has save_dir, name",
        ),
    ],
)
def test_an_argument_that_is_passed_on_and_refused_there_is_one_sentence(ends: Ends, argument: str, said: str) -> None:
    """The logger takes any argument, for the writer that it makes when training starts."""
    _, error = ends(2, *MINE, argument)
    assert f"hetpipe-train: trainer.logger.{said}" in error
    assert "Traceback" not in error


def test_an_error_begins_on_a_line_of_its_own(ends: Ends) -> None:
    """Not behind a progress bar, and no bar is drawn after it."""
    output, error = ends(2, *MINE, "strategy.stages=50")
    assert "Epoch 0" in output
    said, hint = error.splitlines()[-2:]
    assert said.startswith("hetpipe-train: strategy.stages=50 is more than the 3 layers")
    assert "set strategy.stages to at most 3" in said
    assert hint == "(HYDRA_FULL_ERROR=1 shows where it was raised.)"


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


@pytest.mark.parametrize("override", ["strategy.in_flight=0", "strategy.weights=fresh", "strategy.virtual_workers=0"])
def test_what_the_strategy_refuses_is_one_sentence(ends: Ends, override: str) -> None:
    _, error = ends(2, override, "trainer.fast_dev_run=true", "trainer.callbacks.progress=null")
    assert f"hetpipe-train: {override} " in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "argument",
    [
        "output_dir=taken/x",
        "hydra.run.dir=taken/x",
        "trainer.logger.save_dir=taken/x",
        "trainer.callbacks.checkpoint.dirpath=taken/x",
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
        ("# @package _global_\nmodel: [x\nseed: 3\n", "line 3, is no YAML that can be read (expected ',' or ']'"),
        ("# @package _global_\nseed: 3\nseed: 4\n", "line 3, is no YAML that can be read (found duplicate key seed)"),
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
    stop = "trainer.callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"
    _, error = ends(2, *MINE, stop, "trainer.callbacks.stop.monitor=val_los")
    assert "hetpipe-train: trainer.callbacks.stop.monitor=val_los: Early stopping conditioned on metric" in error
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


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_it_trains_ends_with_its_code(folder: Path, number: int, code: int, said: str) -> None:
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
    nobody = ["trainer.num_nodes=2", "strategy.wsp.servers=['127.0.0.1:1']", "strategy.timeout=0.3"]
    _, error = ends(2, *MINE, *nobody)
    assert "hetpipe-train: strategy.wsp.servers=['127.0.0.1:1'] does not answer (VW 1, in state 'hello', has" in error
    assert "the server at 127.0.0.1:1 cannot be reached" in error
    assert "give the address of one that runs" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("kind", [ServersSilent, ServersUnheard, ServerLost])
def test_servers_that_are_gone_are_one_line(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    """Where the program was when it waited explains nothing."""
    error = kind("VW 0 has waited\nfor a server")
    assert report(error, started=True, arguments=()) == 1
    assert capsys.readouterr().err == "hetpipe-train: VW 0 has waited for a server\n"
