"""A wrong setting of any kind ends in one sentence, which names it and the way out, and in exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_hetpipe.cli import hetpipe_plan, hetpipe_server, hetpipe_train
from lightning_hetpipe.planning.plan.profile_file import save
from tests.cli.conftest import USERS_EXPERIMENT, USERS_MODEL
from tests.cli.test_plan import PROFILE

MAINS: dict[str, Callable[[], None]] = {
    "train": hetpipe_train.main,
    "plan": hetpipe_plan.main,
    "server": hetpipe_server.main,
}
MINE = ("--config-dir", "mine", "experiment=mine")
GPT = ("experiment=gpt",)
P = ("profile=p.json",)
T4 = (*P, "devices=[T4]")
DDP = "strategy._target_=lightning.pytorch.strategies.DDPStrategy"
IDENTITY = "_target_=torch.nn.Identity"
STOP = "callbacks=early_stopping"

NAMES = [  # settings that nothing reads
    ("train", ["strategy.in_fligt=6"], "strategy.in_fligt", "did you mean strategy.in_flight?"),
    ("train", ["+strategy.in_fligt=6"], "strategy.in_fligt", "did you mean strategy.in_flight?"),
    ("train", ["strategy=plain", "strategy.in_fligt=6"], "strategy.in_fligt", "did you mean strategy.in_flight?"),
    ("train", ["strategy.wsp.clok_distance=1"], "strategy.wsp.clok_distance", "mean strategy.wsp.clock_distance?"),
    ("train", [f"trainer.callbacks.x.{IDENTITY}"], "trainer.callbacks.x", "is not read there; give callbacks.x=..."),
    (
        "train",
        ["callbacks.early_stopping.patience=1"],
        "callbacks.early_stopping.patience",
        "callbacks has model_checkp",
    ),
    ("train", ["trainer.max_epoch=3"], "trainer.max_epoch", "did you mean trainer.max_epochs?"),
    ("train", ["model.zzz=1"], "model.zzz", "lightning_hetpipe.demo.ResNet has width, blocks, classes, lr, weight_d"),
    ("train", ["data.batch_siz=3"], "data.batch_siz", "did you mean data.batch_size?"),
    ("train", ["strateg.in_flight=6"], "strateg.in_flight", "did you mean strategy.in_flight?"),
    ("train", ["modle=resnet"], "modle", "did you mean model?"),
    ("train", ["sead=3"], "sead", "did you mean seed?"),
    ("train", ["+sead=3"], "sead", "did you mean seed?"),
    ("train", ["experimnt=gpt"], "experimnt", "did you mean experiment?"),
    ("train", ["+size=8"], "size", "is not a setting"),
    ("train", ["callbacks.model_checkpoint.monitr=x"], "callbacks.model_checkpoint.monitr", "checkpoint.monitor?"),
    ("train", ["callbacks.model_checkpont.monitor=x"], "callbacks.model_checkpont.monitor", "checkpoint.monitor?"),
    (
        "train",
        [*MINE, "logger.tensorboard.save_dirr=x"],
        "logger.tensorboard.save_dirr",
        "mean logger.tensorboard.save_dir?",
    ),
    (
        "train",
        [*MINE, "logger.tensorboard.foo=x"],
        "logger.tensorboard.foo",
        "loggers.TensorBoardLogger has save_dir, name",
    ),
    (
        "train",
        ["trainer.plugins=[{_target_: lightning.pytorch.plugins.MixedPrecision, precision: bf16-mixed, devic: cpu}]"],
        "trainer.plugins.0.devic",
        "did you mean trainer.plugins.0.device?",
    ),
    ("plan", [*P, "devics=[RTX-3090]"], "devics", "did you mean devices?"),
    ("plan", [*T4, "link={bandwith: 1 GB/s}"], "link.bandwith", "did you mean link.bandwidth?"),
    ("plan", [*T4, "link={much: 1}"], "link.much", "link has bandwidth, latency"),
    ("plan", [*P, "devices=[{name: T4, memry: 3}]"], "memry", "a Device has no 'memry'; it has name, memory, speed"),
    ("server", ["adress=1"], "adress", "did you mean address?"),
    ("server", ["+security.tokn=1"], "security.tokn", "did you mean security.token?"),
]

VALUES = [  # of the wrong type or size
    ("train", ["strategy.stages=two"], "strategy.stages=two", "must be a whole number or 'auto' or [a whole number, "),
    ("train", ["strategy.stages=0"], "strategy.stages=0", "must be a whole number of at least 1, or 'auto'"),
    ("train", ["strategy.virtual_workers=two"], "strategy.virtual_workers=two", "must be a whole number or"),
    ("train", ["strategy.virtual_workers=[3,1]"], "strategy.virtual_workers=[3, 1]", "and then the most"),
    ("train", ["strategy.virtual_workers=9999"], "strategy.virtual_workers=9999", "is more than 1000"),
    ("train", ["strategy.timeout=abc"], "strategy.timeout=abc", "must be a timedelta or a number."),
    ("train", ["strategy.compile=nothing"], "strategy.compile=nothing", "is no backend of torch.compile here"),
    ("train", ["strategy.compile={fullgraph: true}"], "strategy.compile=", "must be True or False, the name"),
    ("train", ["strategy.accelerator=gpu"], "strategy.accelerator=gpu", "must be an Accelerator or null."),
    ("train", ["strategy.wsp.clock_distance=-1"], "strategy.wsp.clock_distance=-1", "a whole number of at least 0"),
    ("train", ["strategy.wsp.aggregate=avg"], "strategy.wsp.aggregate=avg", "use 'sum' or 'mean'"),
    ("train", ["strategy.wsp.lease=abc"], "strategy.wsp.lease=abc", "must be a timedelta or a number."),
    ("train", ["strategy.wsp.servers=[nowhere]"], "strategy.wsp.servers[0]=nowhere", "is not host:port"),
    ("train", ["strategy.wsp.security={token: abc}"], "strategy.wsp.security.token", "set HETPIPE_TOKEN instead."),
    ("train", ["strategy.virtual_workers=2", "+strategy.wsp.security.ca=ca.pem"], "security.ca=ca.pem", "needs"),
    ("train", ["trainer.max_epochs=abc"], "trainer.max_epochs=abc", "must be a whole number or null."),
    ("train", ["trainer.max_epochs=-5"], "trainer.max_epochs=-5", "must be a non-negative integer or -1."),
    ("train", ["trainer.check_val_every_n_epoch=0"], "trainer.check_val_every_n_epoch=0", "must be at least 1."),
    ("train", ["trainer.accumulate_grad_batches=-1"], "trainer.accumulate_grad_batches=-1", "must be at least 1."),
    ("train", ["trainer.gradient_clip_val=-0.5"], "trainer.gradient_clip_val=-0.5", "must be at least 0."),
    ("train", ["trainer.accelerator=abacus"], "trainer.accelerator=abacus", "You selected an invalid accelerator name"),
    ("train", ["trainer.accelerator=tpu"], "trainer.accelerator=tpu", "or set it to cpu, gpu or auto."),
    ("train", ["trainer.devices=-3"], "trainer.devices=-3", "should be an int > 0."),
    ("train", ["trainer.max_time=abc"], "trainer.max_time=abc", "is not a valid duration."),
    ("train", ["trainer.max_time={days: 1, hoors: 2}"], "trainer: 'hoors'", "is an invalid keyword argument"),
    ("train", ["trainer.strategy=fsdp"], "trainer.strategy=fsdp", "requires a GPU accelerator"),
    ("train", ["trainer.num_nodes=2"], "trainer.num_nodes=2", "needs MASTER_ADDR and MASTER_PORT; set"),
    (
        "train",
        ["trainer.logger=3"],
        "trainer.logger=3",
        "must be a Logger or [a Logger, ...] or true or",
    ),
    ("train", ["trainer.profiler=3"], "trainer.profiler=3", "must be a Profiler or text or null."),
    ("train", ["data.batch_size=abc"], "data.batch_size=abc", "must be a whole number."),
    ("train", ["data.batch_size=0"], "data.batch_size=0", "must be at least 1"),
    ("train", [*GPT, "data.context=0"], "data.context=0", "must be at least 1"),
    ("train", [*GPT, "model.heads=5"], "model.width=96", "must be a multiple of model.heads=5"),
    ("train", ["model.width.x=3"], "model.width={'x': 3}", "must be a whole number."),
    ("train", ["output_dir=3"], "output_dir=3", "must be text."),
    ("train", ["tags=small"], "tags=small", "must be [text, ...]."),
    ("train", ["monitor_mode=least"], "monitor_mode=least", "must be 'min' or 'max'."),
    ("train", [STOP, "monitor=null"], "callbacks.early_stopping.monitor=null", "must be text."),
    ("train", ["seed=abc"], "seed=abc", "must be a whole number or null."),
    ("train", ["seed=true"], "seed=true", "must be a whole number or null."),
    ("train", ["seed=-1"], "seed=-1", "must be from 0 to 4294967295, or null"),
    ("train", ["~model.nope"], "~model.nope", "leave that out."),
    ("train", ["trainer.max_epochs=1,2"], "trainer.max_epochs=1,2", "add -m to run with each of them"),
    ("server", ["service.lease=-1"], "service.lease=-1", "must be at least 0.001."),
    ("server", ["service=null"], "No service is configured", "leave it in."),
    ("train", ["seed=4294967296"], "seed=4294967296", "must be from 0 to 4294967295"),
    ("train", [*MINE, "ckpt_path=nowhere.ckpt"], "ckpt_path=nowhere.ckpt", "cannot be restored (FileNotFoundError"),
    ("plan", [*T4, "strategy.timeline=[3]"], "strategy.timeline=[3]", "must be True, for the last"),
    ("plan", [*T4, "strategy.in_flight=0"], "strategy.in_flight=0", "must be a whole number of at"),
    ("plan", [*T4, "strategy.stages=2"], "strategy.stages=2", "cannot be planned for 1 devices"),
    ("plan", [*T4, "ordered=2"], "ordered=2", "must be true or false."),
    ("plan", [*T4, "precision=8"], "precision=8", "must be one of 32, 32-highest, 16"),
    ("plan", [*T4, "synchronise=long"], "synchronise='long'", "must be a number and a unit, such as"),
    ("plan", [*T4, "optimizer=adamm"], "optimizer='adamm'", "give one of sgd, "),
    ("plan", [*T4, "link=fast"], "link=fast", "Link.bandwidth='fast' must be a number and a unit, such as '12 GB/s'"),
    ("plan", [*T4, "link.much=1"], "'much': 1", "give a bandwidth, such as"),
    ("plan", [*T4, "link=12"], "link=12", "give a bandwidth, such as"),
    ("plan", [*T4, "link=null"], "link=null", "give a bandwidth, such as"),
    ("plan", [*P, "devices=[]"], "devices=[]", "names no device; give at least one, such as devices=[RTX-3090]."),
    ("plan", [*P, "devices=[{name: T4, memory: 24}]"], "memory=24", "is 24 bytes; did you mean '24 GiB'"),
    ("plan", [*P, "devices=[RTX-3O90]"], "devices=[RTX-3O90]", "which has RTX-3090, V100-16, nor in the catalogue"),
    ("server", ["address=7070"], "address=7070", "must be host:port"),
    ("server", ["security.insecure=perhaps"], "security.insecure=perhaps", "must be true or false."),
    ("server", ["command=sing"], "command=sing", "must be 'serve' or 'status'."),
    ("server", ["status", "timeout=0"], "timeout=0", "must be at least 0.001."),
    ("server", ["security.token=abc"], "security.token", "set HETPIPE_TOKEN instead."),
]

TARGETS = [  # what is to be built
    ("train", ["model._target_=no_such.Model"], "model._target_=no_such.Model", "cannot be found"),
    (
        "train",
        ["model._target_=lightning.Trainr"],
        "model._target_=lightning.Trainr",
        "did you mean lightning.Trainer?",
    ),
    ("train", [f"trainer.{IDENTITY}"], f"trainer.{IDENTITY}", "but trainer must be a lightning.Trainer"),
    ("train", [f"callbacks.x.{IDENTITY}"], f"callbacks.x.{IDENTITY}", "must be a lightning.Callback"),
    ("train", [f"trainer.profiler.{IDENTITY}"], f"trainer.profiler.{IDENTITY}", "must be a Profiler or text or null."),
    ("train", ["callbacks.model_checkpoint._target_=null"], "callbacks.model_checkpoint._target_=null", "leave it"),
    ("train", ["~model"], "No model is configured", "choose an experiment, such as experiment=digits."),
    ("train", ["~data._target_"], "data has no _target_", "give data._target_="),
    ("train", ["~strategy"], "strategy has no _target_", "choose strategy=hetpipe, or strategy=plain."),
    ("train", [DDP], DDP, "give its name to the Trainer, as in strategy=plain trainer.strategy=ddp"),
    ("train", ["model._target_=tests.cli.test_settings.needy"], "model.depth", "give model.depth=..."),
    ("train", ["model.width=???"], "model.width", "give model.width="),
    ("train", ["model.width=${nowhere}"], "model.width", "Interpolation key 'nowhere' not found; give model.width="),
    ("train", ["model=gpt"], "model.context", "give model.context=..., or choose an experiment that has it"),
    ("server", ["service._target_=no.such.Service"], "service._target_=no.such.Service", "cannot be found"),
]

COMPOSITION = [  # the command line and the files
    ("train", ["experiment=gptt"], "experiment=gptt", "does not exist among digits, gpt; did you mean experiment=gpt?"),
    ("train", ["experiment=zzz"], "experiment=zzz", "does not exist among digits, gpt; choose one of them."),
    ("train", ["experiment=null"], "experiment=null", "choose one of those that hetpipe-train --help lists."),
    ("train", ["model=3"], "model=3", "choose one of those that hetpipe-train --help lists."),
    ("train", ["strategy.stages=[1"], "strategy.stages=[1", "write section.key=value"),
    ("train", ["strategy.stages=1,2"], "strategy.stages=1,2", "add -m to run with each of them"),
    ("train", ["+model=gpt"], "model", "Multiple values for model"),
    ("train", ["strategy.wsp=[]"], "strategy.wsp=[]", "takes two: '~strategy.wsp' '+strategy.wsp=[]'"),
    ("train", ["~strategy.nothing"], "strategy.nothing", "~strategy.nothing takes nothing away"),
    ("train", ["hydra.job.num=abc"], "hydra.job.num=abc", "could not be converted to Integer"),
    ("train", ["hydra.foo=3"], "hydra.foo", "use +hydra.foo=3"),
    ("train", ["--config-dir", "nowhere"], "nowhere", "Additional config directory"),
    ("plan", [*P, "cluster=mixed_bax"], "cluster=mixed_bax", "did you mean cluster=mixed_box?"),
    ("plan", [*P, "cluster=null"], "cluster=null", "choose one of those that hetpipe-plan --help lists."),
]

TOGETHER = [  # settings that exclude each other, or are of no use here; files of the wrong kind
    ("plan", [], "profile=null", "give profile=FILE, or choose an experiment, such as experiment=digits."),
    ("plan", ["measure=link"], "measure=link", "must be"),
    ("plan", ["measure=links", "profil=p.json"], "profil", "did you mean profile?"),
    ("plan", ["profile=no.json"], "profile=no.json", "(No such file or directory); give another file"),
    (
        "plan",
        ["profile=other.json"],
        "profile=other.json",
        "the key 'in_flight', which is not known; give a profile",
    ),
    ("plan", ["profile=small.json", "devices=[T4]"], "profile=small.json", "memory_bytes is 24 bytes, less than any"),
    ("plan", [*T4, "strategy.plan=p.json"], "strategy.plan=p.json", "is for hetpipe-train; leave it out"),
    ("plan", [*T4, "cluster=mixed_box"], "devices=['T4']", "leave one of them out."),
    (
        "plan",
        [*T4, "strategy.virtual_workers=2"],
        "strategy.virtual_workers=2",
        "how many there are follows from the allocation",
    ),
    ("server", ["address=0.0.0.0:7070"], "address=0.0.0.0:7070", "security has no certificates"),
    ("server", ["address=0.0.0.0:0", "security.insecure=true"], "address=0.0.0.0:0", "HETPIPE_TOKEN is not set"),
    ("server", ["security.ca=ca.pem"], "security.ca=ca.pem", "needs security.certificate beside it"),
    ("server", ["-m", "address=127.0.0.1:0,127.0.0.1:1"], "-m", "start hetpipe-server once for each address."),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a user's experiment and some profiles."""
    (tmp_path / "users_model.py").write_text(USERS_MODEL)
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "mine.yaml").write_text(USERS_EXPERIMENT)
    save(PROFILE, tmp_path / "p.json")
    (tmp_path / "small.json").write_text((tmp_path / "p.json").read_text().replace(str(24 << 30), "24"))
    (tmp_path / "other.json").write_text('{"schema_version": 1, "in_flight": 2}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    monkeypatch.delenv("HETPIPE_TOKEN", raising=False)
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("program", "arguments", "setting", "fragment"),
    [
        # Neighbours are alike, and each composes a configuration, so that `make test` runs every third.
        pytest.param(*case, id=f"{case[0]}-{case[2]}-{number}", marks=[] if number % 3 == 0 else pytest.mark.slow)
        for number, case in enumerate([*NAMES, *VALUES, *TARGETS, *COMPOSITION, *TOGETHER])
    ],
)
@pytest.mark.usefixtures("folder")
def test_it_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    program: str,
    arguments: list[str],
    setting: str,
    fragment: str,
) -> None:
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # the process's logging stays as it is
    monkeypatch.setattr(sys, "argv", [f"hetpipe-{program}", *arguments, *quiet])
    with pytest.raises(SystemExit, match="2"):
        MAINS[program]()
    *before, sentence, hint = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"hetpipe-{program}: ")
    assert setting in sentence
    assert fragment in sentence
    assert "++" not in sentence
    assert hint == "(HYDRA_FULL_ERROR=1 shows where it was raised.)"
    assert not any("Traceback" in line for line in before)
