"""Command lines: wrong names, values, targets and files, and settings that exclude each other or are of no use."""

from __future__ import annotations

import sys
from dataclasses import replace

from lightning_hetpipe.placement import device_placement
from lightning_hetpipe.planning.plan.profile_file import save
from tests.cli.conftest import USERS_EXPERIMENT, USERS_MODEL
from tests.cli.test_plan import PROFILE
from tests.golden.cases import Case, Place
from tests.support.composing import compose_once

MINE = ("--config-dir", "mine", "experiment=mine")
GPT = ("experiment=gpt",)
P = ("profile=p.json",)
T4 = (*P, "devices=[T4]")
IDENTITY = "_target_=torch.nn.Identity"
DDP = "lightning.pytorch.strategies.DDPStrategy"
LOGGER = ("save_dir", "name", "version")
RESNET = ("width", "blocks", "classes", "lr")
LIST = "choose one of those"
SWEEP = "add -m"
LINK = "12 GB/s"
NODE = "{_target_: lightning_hetpipe.Node, name: a, devices: [V100-61]}"


def run(program: str, arguments: list[str], place: Place) -> None:
    """Run a command in this process, in a folder with a user's experiment and some profiles."""
    from lightning_hetpipe.cli import hetpipe_plan, hetpipe_server, hetpipe_train

    mains = {
        "train": hetpipe_train.main,
        "plan": hetpipe_plan.main,
        "server": hetpipe_server.main,
        "host": hetpipe_server.host_main,
    }
    folder = place.folder
    (folder / "users_model.py").write_text(USERS_MODEL)
    (folder / "mine" / "experiment").mkdir(parents=True)
    (folder / "mine" / "experiment" / "mine.yaml").write_text(USERS_EXPERIMENT)
    save(PROFILE, folder / "p.json")
    save(replace(PROFILE, times={"V100-16": PROFILE.times["V100-16"]}), folder / "one.json")
    (folder / "small.json").write_text((folder / "p.json").read_text().replace(str(24 << 30), "24"))
    (folder / "other.json").write_text('{"schema_version": 1, "in_flight": 2}')
    compose_once(place.patch)
    place.environment(PL_SEED_WORKERS="0")
    place.patch.setattr(device_placement, "all_devices", list)  # whatever this machine has
    place.patch.delitem(sys.modules, "users_model", raising=False)
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]  # the process's logging stays as it is
    quiet.append("hydra.output_subdir=null")  # no case reads the files of Hydra's
    place.patch.setattr(sys, "argv", [f"hetpipe-{program}", *arguments, *quiet])
    mains[program]()


def command(program: str, arguments: list[str], setting: str, value: str, *way_out: str) -> Case:
    """Case of a command line, which ends with exit code 2 and one sentence."""
    name = f"hetpipe-{program} {' '.join(arguments)}"[:90]
    return Case(name, lambda place: run(program, arguments, place), setting, value, way_out, SystemExit)


def quoting(program: str, arguments: list[str], setting: str, value: str, *way_out: str) -> Case:
    """Case of a command line that Lightning or Hydra refuses, in sentences of its own."""
    return replace(command(program, arguments, setting, value, *way_out), is_ours=False)


NAMES = [  # settings that nothing reads
    command("train", ["strategy.in_fligt=6"], "strategy.in_fligt", "", "did you mean strategy.in_flight?"),
    command("train", ["strategy.wsp.clok_distance=1"], "strategy.wsp.clok_distance", "", "strategy.wsp.clock_distance"),
    command("train", [f"trainer.callbacks.x.{IDENTITY}"], "trainer.callbacks.x", "", "give callbacks.x="),
    command("train", ["callbacks.early_stopping.patience=1"], "callbacks.early_stopping.patience", "",
            "model_checkpoint"),
    command("train", ["trainer.max_epoch=3"], "trainer.max_epoch", "", "did you mean trainer.max_epochs?"),
    command("train", ["strateg.in_flight=6"], "strateg.in_flight", "", "did you mean strategy.in_flight?"),
    command("train", ["in_flight=6"], "in_flight", "", "did you mean strategy.in_flight?"),
    command("train", ["modle=resnet"], "modle", "", "did you mean model?"),
    command("train", ["+sead=3"], "sead", "", "did you mean seed?"),
    command("train", ["callbacks.model_checkpoint.monitr=x"], "callbacks.model_checkpoint.monitr", "", "monitor?"),
    command("train", [*MINE, "logger.tensorboard.save_dirr=x"], "logger.tensorboard.save_dirr", "", "save_dir?"),
    command("train", [*MINE, "logger.tensorboard.foo=x"], "logger.tensorboard.foo", "", *LOGGER),
    command("plan", [*T4, "link={bandwith: 1 GB/s}"], "link.bandwith", "", "did you mean link.bandwidth?"),
    command("plan", [*P, "cluster=mixed_box", "+cluster.nodez=3"], "cluster.nodez", "", "did you mean cluster.nodes?"),
    command("host", ["adress=1"], "adress", "", "did you mean address?"),
    command("server", ["stattus"], "stattus", "", "serve or status"),
]  # fmt: skip

VALUES = [  # of the wrong type or size
    command("train", ["strategy.stages=two"], "strategy.stages", "two", "whole number", "'auto'"),
    command("train", ["strategy.virtual_workers=two"], "strategy.virtual_workers", "two", "whole number"),
    command("train", ["strategy.timeout=abc"], "strategy.timeout", "abc", "timedelta", "number"),
    command("train", ["strategy.accelerator=gpu"], "strategy.accelerator", "gpu", "Accelerator", "null"),
    command("train", ["strategy.wsp.lease=abc"], "strategy.wsp.lease", "abc", "timedelta", "number"),
    command("train", ["strategy.wsp.security={token: abc}"], "strategy.wsp.security.token", "", "HETPIPE_TOKEN"),
    command("train", ["trainer.max_epochs=abc"], "trainer.max_epochs", "abc", "whole number", "null"),
    command("train", ["trainer.check_val_every_n_epoch=0"], "trainer.check_val_every_n_epoch", "0", "at least 1"),
    command("train", ["trainer.accumulate_grad_batches=-1"], "trainer.accumulate_grad_batches", "-1", "at least 1"),
    quoting("train", ["trainer.accelerator=tpu"], "trainer.accelerator", "tpu", "cpu, gpu or auto"),
    command("train", ["trainer.max_time={days: 1, hoors: 2}"], "trainer", "'hoors'"),
    command("train", ["trainer.logger=3"], "trainer.logger", "3", "Logger", "true"),
    command("train", ["data.batch_size=0"], "data.batch_size", "0", "at least 1"),
    command("train", ["model.width.x=3"], "model.width", "{'x': 3}", "whole number"),
    command("train", ["monitor_mode=least"], "monitor_mode", "least", "'min'", "'max'"),
    command("train", ["seed=true"], "seed", "true", "whole number", "null"),
    command("train", ["trainer.max_epochs=1,2"], "trainer.max_epochs", "1,2", SWEEP),
    command("plan", [*T4, "strategy.in_flight=0"], "strategy.in_flight", "0", "at least 1"),
    command("plan", [*T4, "precision=8"], "precision", "8", "32, 32-highest, 16"),
    command("plan", [*T4, "link=fast"], "link", "fast", "number and a unit", LINK),
    command("plan", [*T4, "link=12"], "link", "12", "bandwidth", LINK),
    command("plan", [*T4, "link=null"], "link", "null", "bandwidth", LINK),
    command("plan", [*P, "devices=[]"], "devices", "[]", "devices=[RTX-3090]"),
    command("plan", [*P, "devices=[RTX-3O90]"], "devices", "[RTX-3O90]", "RTX-3090", "V100-16", "catalogue"),
    command("plan", [*T4, "split=yes"], "split", "yes", "true, auto or false"),
    command(
        "plan", [*P, "cluster=mixed_box", "cluster.link=3"], "cluster.link", "3", "Link", "bandwidth", LINK, "null"
    ),
    command(
        "plan",
        [*P, "cluster=mixed_box", "strategy.allocation=nb"],
        "strategy.allocation",
        "nb",
        "'np'",
        "'ed'",
        "'hd'",
        "'placed'",
    ),
    command("server", ["address=7070"], "address", "7070", "host:port", "127.0.0.1:5000"),
    command("server", ["security.insecure=perhaps"], "security.insecure", "perhaps", "true or false"),
    command("server", ["service.lease=-1"], "service.lease", "-1", "at least 0.001"),
]

TARGETS = [  # what is to be built
    command("train", ["model._target_=no_such.Model"], "model._target_", "no_such.Model", "working directory"),
    command("train", ["model._target_=lightning.Trainr"], "model._target_", "lightning.Trainr", "lightning.Trainer?"),
    command("train", ["model._target_=sys.path"], "model._target_", "sys.path", "class or a function"),
    command("train", ["model._target_=lightning.Trainer.fitt"], "model._target_", "lightning.Trainer.fitt",
            "Trainer.fit?"),
    command("train", [f"trainer.{IDENTITY}"], "trainer._target_", "torch.nn.Identity", "lightning.Trainer"),
    command("train", [f"callbacks.x.{IDENTITY}"], "callbacks.x._target_", "torch.nn.Identity", "lightning.Callback"),
    command("train", [f"trainer.profiler.{IDENTITY}"], "trainer.profiler._target_", "torch.nn.Identity", "Profiler",
            "null"),
    command("train", ["callbacks.model_checkpoint._target_=null"], "callbacks.model_checkpoint._target_", "null",
            "callbacks.model_checkpoint=null"),
    command("train", ["~model"], "model", "", "experiment=digits"),
    command("train", ["~data._target_"], "data", "", "data._target_="),
    command("train", ["~strategy"], "strategy", "", "strategy=hetpipe", "strategy=plain"),
    command("train", [f"strategy._target_={DDP}"], "strategy._target_", DDP, "strategy=plain", "trainer.strategy=ddp"),
    command("train", ["model._target_=tests.cli.test_settings.needy"], "model.depth", "", "give model.depth="),
    command("train", ["model.width=???"], "model.width", "", "give model.width="),
    command("train", ["model.width=${nowhere}"], "model.width", "'nowhere'", "give model.width="),
    command("train", ["model=gpt"], "model.context", "", "give model.context=", "choose an experiment"),
    command("plan", [*P, "+cluster.nodes=[]"], "cluster", "", "cluster._target_=lightning_hetpipe.Cluster"),
    command("server", ["service._target_=no.such.Service"], "service._target_", "no.such.Service", "working directory"),
    command("server", ["service=null"], "service", "", "leave it in"),
]  # fmt: skip

COMPOSITION = [  # the command line and the files
    command("train", ["experiment=null"], "experiment", "null", LIST, "hetpipe-train --help"),
    command("train", ["strategy.stages=1,2"], "strategy.stages", "1,2", SWEEP),
    command("train", ["~model.nope"], "~model.nope", "", "leave that out"),
    quoting("train", ["hydra.foo=3"], "hydra.foo", "", "use +hydra.foo=3"),
    command("plan", [*P, "cluster=null"], "cluster", "null", LIST, "hetpipe-plan --help"),
]

TOGETHER = [  # settings that exclude each other, or are of no use here; files of the wrong kind
    command("train", ["strategy.virtual_workers=2", "+strategy.wsp.security.ca=ca.pem"], "security.ca", "ca.pem",
            "certificate", "key", "none of them"),
    command("plan", [], "profile", "null", "profile=FILE", "experiment=digits"),
    command("plan", ["measure=link"], "measure", "link", "links"),
    command("plan", ["measure=links", "profil=p.json"], "profil", "", "did you mean profile?"),
    command("plan", ["measure=links", "cluster=mixed_box"], "measure", "links", "a cluster", "leave one of both out"),
    command("plan", ["measure=links", *P], "measure", "links", "profile=p.json", "leave one of both out"),
    command("plan", ["profile=no.json"], "profile", "no.json", "No such file", "give another file"),
    command("plan", ["profile=other.json"], "profile", "other.json", "in_flight", "give a profile"),
    command(
        "plan", ["profile=small.json", "devices=[T4]"], "profile", "small.json", "memory_bytes=24", "1 MiB or more"
    ),
    command("plan", [*T4, "strategy.plan=p.json"], "strategy.plan", "p.json", "hetpipe-train", "leave it out"),
    command("plan", [*T4, "cluster=mixed_box"], "devices", "['T4']", "a cluster", "leave one of them out"),
    command("plan", [*T4, "strategy.virtual_workers=2"], "strategy.virtual_workers", "2",
            "strategy.allocation=np, ed, hd"),
    command("plan", [*T4, "strategy.stages=[1,2]"], "strategy.stages", "[1, 2]", "stages of one",
            "strategy.stages=auto"),
    command("plan", [*P], "profile", "p.json", "'cpu'", "RTX-3090, V100-16", "devices=[RTX-3090,T4]",
            "cluster=mixed_box"),
    command("plan", [*T4, "ordered=true", "split=auto"], "split", "auto", "ordered=true", "leave one of them out"),
    command("plan", [*P, "cluster=mixed_box", "strategy.allocation=np", "ordered=true"], "ordered", "true",
            "strategy.allocation=np", "leave it out"),
    command("plan", [*P, "cluster=mixed_box", "strategy.allocation=np", "split=auto"], "split", "auto",
            "strategy.virtual_workers=1", "leave split out"),
    command("plan", [*P, "cluster=mixed_box", "strategy.allocation=np", "strategy.wsp.shares=[1,2]"],
            "strategy.wsp.shares", "[1, 2]", "equal", "auto", "strategy.virtual_workers=1"),
    command("plan", ["profile=one.json", "cluster=mixed_box", f"cluster.nodes=[{NODE}]"], "cluster", "'V100-61'",
            "V100-16", "did you mean 'V100-16'"),
    command("plan", [*P, "cluster=mixed_box", f"cluster.nodes=[{NODE}]"], "'V100-61'", "", "RTX-3090, V100-16",
            "did you mean 'V100-16'"),
    command("server", ["address=0.0.0.0:7070"], "address", "0.0.0.0:7070", "ca, certificate and key", "insecure"),
    command("server", ["address=0.0.0.0:0", "security.insecure=true"], "address", "0.0.0.0:0", "HETPIPE_TOKEN"),
    command("server", ["security.ca=ca.pem"], "security.ca", "ca.pem", "security.certificate"),
    command("server", ["-m", "address=127.0.0.1:0,127.0.0.1:1"], "-m", "", "hetpipe-server once for each address"),
    command("host", ["-m", "address=127.0.0.1:0,127.0.0.1:1"], "-m", "", "hetpipe-host once for each address"),
    command("host", ["address=0.0.0.0:0", "security.insecure=true"], "address", "0.0.0.0:0", "HETPIPE_TOKEN"),
]  # fmt: skip

ALIKE = [  # those above again, of other settings; each composes a configuration, so that `make test` leaves them out
    command("train", ["+strategy.in_fligt=6"], "strategy.in_fligt", "", "did you mean strategy.in_flight?"),
    command("train", ["strategy=plain", "strategy.in_fligt=6"], "strategy.in_fligt", "", "strategy.in_flight"),
    command("train", ["model.zzz=1"], "model.zzz", "", "lightning_hetpipe.demo.ResNet", *RESNET),
    command("train", ["data.batch_siz=3"], "data.batch_siz", "", "did you mean data.batch_size?"),
    command("train", ["sead=3"], "sead", "", "did you mean seed?"),
    command("train", ["experimnt=gpt"], "experimnt", "", "did you mean experiment?"),
    command("train", ["+size=8"], "size", "", "model", "data", "trainer", "strategy", "seed"),
    command("train", ["callbacks.model_checkpont.monitor=x"], "callbacks.model_checkpont.monitor", "",
            "model_checkpoint"),
    command("train", ["trainer.plugins=[{_target_: lightning.pytorch.plugins.MixedPrecision, precision: bf16-mixed,"
            " devic: cpu}]"], "trainer.plugins.0.devic", "", "did you mean trainer.plugins.0.device?"),
    command("plan", [*P, "devics=[RTX-3090]"], "devics", "", "did you mean devices?"),
    command("plan", [*T4, "link={much: 1}"], "link.much", "", "bandwidth", "latency"),
    command("plan", [*P, "devices=[{name: T4, memry: 3}]"], "devices[0].memry", "", "did you mean devices[0].memory?"),
    command("server", ["adress=1"], "adress", "", "did you mean address?"),
    command("server", ["+security.tokn=1"], "security.tokn", "", "did you mean security.token?"),
    command("train", ["strategy.stages=0"], "strategy.stages", "0", "at least 1", "'auto'"),
    command(
        "train", ["strategy.virtual_workers=[3,1]"], "strategy.virtual_workers", "[3, 1]", "fewest", "most", "1000"
    ),
    command("train", ["strategy.virtual_workers=9999"], "strategy.virtual_workers", "9999", "1000"),
    command("train", ["strategy.compile=nothing"], "strategy.compile", "nothing", "aot_eager", "inductor"),
    command(
        "train", ["strategy.compile={fullgraph: true}"], "strategy.compile", "fullgraph", "true", "false", "backend"
    ),
    command("train", ["strategy.wsp.clock_distance=-1"], "strategy.wsp.clock_distance", "-1", "at least 0"),
    command("train", ["strategy.wsp.aggregate=avg"], "strategy.wsp.aggregate", "avg", "'sum'", "'mean'"),
    command("train", ["strategy.wsp.servers=[nowhere]"], "strategy.wsp.servers[0]", "nowhere", "host:port"),
    quoting("train", ["trainer.max_epochs=-5"], "trainer.max_epochs", "-5", "non-negative", "-1"),
    command("train", ["trainer.gradient_clip_val=-0.5"], "trainer.gradient_clip_val", "-0.5", "at least 0"),
    quoting("train", ["trainer.accelerator=abacus"], "trainer.accelerator", "abacus", "cpu"),
    command("train", ["trainer.devices=-3"], "trainer.devices", "-3", "> 0"),
    quoting("train", ["trainer.max_time=abc"], "trainer.max_time", "abc", "duration"),
    quoting("train", ["trainer.strategy=fsdp"], "trainer.strategy", "fsdp", "GPU accelerator"),
    command("train", ["trainer.num_nodes=2"], "trainer.num_nodes", "2", "MASTER_ADDR", "MASTER_PORT"),
    command("train", ["trainer.profiler=3"], "trainer.profiler", "3", "Profiler", "text", "null"),
    command("train", ["data.batch_size=abc"], "data.batch_size", "abc", "whole number"),
    command("train", [*GPT, "data.context=0"], "data.context", "0", "at least 1"),
    command("train", [*GPT, "model.heads=5"], "model.width", "96", "multiple", "model.heads=5"),
    command("train", ["output_dir=3"], "output_dir", "3", "text"),
    command("train", ["tags=small"], "tags", "small", "[text, ...]"),
    command("train", ["callbacks=early_stopping", "monitor=null"], "callbacks.early_stopping.monitor", "null", "text"),
    command("train", ["seed=abc"], "seed", "abc", "whole number", "null"),
    command("train", ["seed=-1"], "seed", "-1", "at least 0", "at most 4294967295", "null"),
    command("train", ["seed=4294967296"], "seed", "4294967296", "at least 0", "at most 4294967295"),
    command("train", [*MINE, "ckpt_path=nowhere.ckpt"], "ckpt_path", "nowhere.ckpt", "null"),
    command("plan", [*T4, "strategy.timeline=[3]"], "strategy.timeline", "[3]", "true", "false", "(100, 120)"),
    command("plan", [*T4, "strategy.stages=2"], "strategy.stages", "2", "at most 1"),
    command("plan", [*T4, "ordered=2"], "ordered", "2", "true or false"),
    command("plan", [*T4, "synchronise=long"], "synchronise", "'long'", "number and a unit"),
    command("plan", [*T4, "optimizer=adamm"], "optimizer", "'adamm'", "adamw", "sgd"),
    command("plan", [*T4, "link.much=1"], "link.much", "", "bandwidth", "latency"),
    command("plan", [*P, "devices=[{name: T4, memory: 24}]"], "memory", "24", "did you mean '24 GiB'"),
    command("plan", [*T4, "strategy.split=maybe"], "strategy.split", "maybe", "true, false", "'auto'"),
    command("server", ["command=sing"], "command", "sing", "'serve'", "'status'"),
    command("server", ["status", "timeout=0"], "timeout", "0", "at least 0.001"),
    command("server", ["security.token=abc"], "security.token", "", "HETPIPE_TOKEN"),
    command("host", ["address=7070"], "address", "7070", "host:port", "127.0.0.1:7071"),
    command("train", ["experiment=gptt"], "experiment", "gptt", "digits, gpt", "did you mean experiment=gpt?"),
    command("train", ["experiment=zzz"], "experiment", "zzz", "digits, gpt"),
    command("train", ["model=3"], "model", "3", LIST, "hetpipe-train --help"),
    command("train", ["strategy.stages=[1"], "strategy.stages", "[1", "section.key=value"),
    quoting("train", ["+model=gpt"], "model", "Multiple"),
    command("train", ["strategy.wsp=[]"], "strategy.wsp", "[]", "'~strategy.wsp' '+strategy.wsp=[]'"),
    command("train", ["~strategy.nothing"], "strategy.nothing", "", "takes nothing away"),
    command("train", ["hydra.job.num=abc"], "hydra.job.num", "abc", "Integer"),
    command("train", ["--config-dir", "nowhere"], "config directory", "nowhere"),
    command("plan", [*P, "cluster=mixed_bax"], "cluster", "mixed_bax", "did you mean cluster=mixed_box?"),
]  # fmt: skip

CASES = [*NAMES, *VALUES, *TARGETS, *COMPOSITION, *TOGETHER]
