"""Inputs of hetpipe-plan: its checked settings, the profile of the model, and the devices."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from inspect import isclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from lightning_hetpipe.cli import config_checks
from lightning_hetpipe.cli.cluster_plans import COMPARE
from lightning_hetpipe.cli.start_up import ConsoleScript
from lightning_hetpipe.cli.targets import built, is_section, locate, nodes, written
from lightning_hetpipe.errors import SettingError, of_file
from lightning_hetpipe.placement.progress import on_terminal
from lightning_hetpipe.planning.model.catalogue import PRECISIONS, gpus, known, nearest_gpu
from lightning_hetpipe.planning.model.cluster import PCIE, Cluster, Devices, DeviceSlot, Latency, LinkGiven, Node
from lightning_hetpipe.planning.model.profile import Profile
from lightning_hetpipe.planning.model.stage_memory import optimizer_state, planned_policies
from lightning_hetpipe.planning.model.units import seconds_of
from lightning_hetpipe.planning.plan import profile_file
from lightning_hetpipe.planning.plan.profile_file import ProfileCache
from lightning_hetpipe.planning.search.problem import PlanningProblem
from lightning_hetpipe.rules.versions import POLICIES, WeightPolicy
from lightning_hetpipe.settings import Length, declared
from lightning_hetpipe.settings import check as check_value
from lightning_hetpipe.strategy.arguments import HetPipeArguments

if TYPE_CHECKING:
    import lightning as L

    from lightning_hetpipe.strategy.profiling_strategy import Profiled


PROGRAM = ConsoleScript(
    "hetpipe-plan",
    config_checks.GROUPS,
    {
        **config_checks.SETTINGS,
        "measure": Literal["links"] | None,
        "profile": str | None,
        "devices": Annotated[Any, Length(1), "null, or at least one device, such as devices=[RTX-3090]"],
        "link": LinkGiven,
        "optimizer": str | float,
        "split": Annotated[
            bool | Literal["auto"],
            "true, auto or false: hetpipe-plan chooses the devices and shares of each stage itself; set split=auto, or"
            " leave it out",
        ],
        "ordered": bool,
        "synchronise": Latency,
        "precision": Annotated[Any, lambda value: str(value) in PRECISIONS, f"one of {', '.join(PRECISIONS)}"],
    },
)

_OF_OTHERS = ("model", "data", "trainer", "callbacks", "logger", "experiment")
"""Groups whose sections belong to other packages, most of them to Lightning."""

_SILENT = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "barebones": False,
    "fast_dev_run": False,
}
"""Settings of the Trainer that switch off what measuring layers does not need."""


def check_targets(config: DictConfig, *, measured: bool) -> None:
    """Check sections of other packages if the model is ``measured``, or if the command line changes one of them."""
    if measured or any(map(_is_given, _OF_OTHERS)):
        config_checks.check_targets(config)


def check(config: DictConfig) -> None:
    """Raise SettingError for settings of ours that are unknown, missing or of the wrong kind, or exclude each other."""
    if config.get("profile") is None and config.get("model") is None:
        raise SettingError(
            "profile=null and no model is configured; give profile=FILE, or choose an experiment, such as"
            " experiment=digits."
        )
    config_checks.check(config, PROGRAM, () if config.get("profile") is not None else config_checks.BUILT)
    if config.optimizer != "auto":
        optimizer_state(config.optimizer)
    if config.devices is not None and config.cluster is not None:
        raise SettingError(f"devices={config.devices} is given together with a cluster; leave one of them out.")
    if not isinstance(stages := of_strategy(config, "stages"), int | str):
        raise SettingError(
            f"strategy.stages={stages} is for several virtual workers; give the stages of one, or strategy.stages=auto."
        )
    if (workers := of_strategy(config, "virtual_workers")) != 1:
        raise SettingError(
            f"strategy.virtual_workers={workers}: how many there are follows from the allocation; give"
            " strategy.allocation=np, ed, hd, placed or auto, or strategy.virtual_workers=1 for one over all devices."
        )
    config_checks.synchronisation(config)
    if config.split and config.ordered:
        name = "strategy.split" if OmegaConf.is_interpolation(config, "split") else "split"
        raise SettingError(
            f"ordered=true gives each stage one device, and {name}={written(config.split)} joins devices; leave one of"
            " them out."
        )
    if _is_given("strategy.plan") and config.strategy.plan is not None:
        raise SettingError(
            f"strategy.plan={config.strategy.plan} is for hetpipe-train; leave it out, as hetpipe-plan makes a plan of"
            " its own."
        )


def given_profile(config: DictConfig) -> Profile | None:
    """Return the profile of the file ``profile``, or None if the model is to be measured."""
    if config.profile is None:
        return None
    try:
        return profile_file.load(config.profile)
    except SettingError as error:
        raise of_file("profile", error, "give a profile.json of hetpipe-plan") from error


def profile_of(config: DictConfig, given: Profile | None) -> tuple[Profile, str | float, Sequence[WeightPolicy]]:
    """Return ``given`` or else the profile of the model, the optimizer for the memory model, and weight policies. A run
    with this optimizer takes the first policy that fits."""
    optimizer: str | float | None = "adam"
    policies: Sequence[WeightPolicy] = planned_policies("adam")
    if given is None:
        given, optimizer, policies = _measured(config)
    if config.optimizer != "auto":
        optimizer, policies = config.optimizer, planned_policies(config.optimizer)
    if optimizer is None:
        raise SettingError(
            "optimizer=auto: the state of the model's optimizer is not known; give optimizer=N, its bytes for each"
            " byte of the weights."
        )
    policy = POLICIES.get(of_strategy(config, "weights"))
    return given, optimizer, policies if policy is None else [policy]


def _measured(config: DictConfig) -> Profiled:
    """Measure the layers in the model's first minibatch, which runs as in hetpipe-train."""
    import lightning as L

    from lightning_hetpipe.strategy import profiling_strategy

    config = deepcopy(config)
    if config.get("seed") is not None:
        L.seed_everything(config.seed, workers=True, verbose=False)
    kept = {key: of_strategy(config, key) for key in ("module", "timeout")}
    callbacks = _finetuning(config)
    with open_dict(config):
        config.trainer.pop("callbacks", None)
        config.trainer.update(_SILENT)
        config.trainer.pop("strategy", None)
    strategy = profiling_strategy.ProfilingStrategy(ProfileCache(), on_terminal, widths=bool(config.split), **kept)
    model = built(config, "model", L.LightningModule)
    data = built(config, "data", L.LightningDataModule)
    trainer = built(config, "trainer", L.Trainer, strategy=strategy, callbacks=callbacks)
    return profiling_strategy.profile(trainer, model, datamodule=data)


def _finetuning(config: DictConfig) -> list[L.Callback]:
    """Build the Trainer's callbacks that begin to train weights after the first minibatch."""
    from lightning.pytorch.callbacks import BaseFinetuning

    given: Any = OmegaConf.to_container(config, resolve=True)
    callbacks = given["trainer"].get("callbacks")
    found = [each for each in nodes(callbacks, callbacks, "trainer.callbacks") if is_section(each[2])]
    kinds = {path: locate(value["_target_"], path) for path, _, value, _ in found}
    finetuning = [path for path, kind in kinds.items() if isclass(kind) and issubclass(kind, BaseFinetuning)]
    return [built(config, path, BaseFinetuning) for path in finetuning]


def cluster_of(config: DictConfig) -> Cluster:
    """Return the cluster of the devices that are given, or else of this machine's devices."""
    if config.devices is not None:
        values: Any = OmegaConf.to_container(config, resolve=True)
        given = values["devices"] if isinstance(values["devices"], list) else [values["devices"]]
        names = [each if isinstance(each, dict) else str(each) for each in given]
        link = check_value("link", values["link"], LinkGiven)
        link = None if link == PCIE and not _is_given("link") else link
        return Cluster([Node("here", check_value("devices", names, Devices), link)])
    return _discovered() if config.cluster is None else built(config, "cluster", Cluster)


def _discovered() -> Cluster:
    from lightning_hetpipe.placement import device_placement  # with torch

    return device_placement.discovered_cluster()


def refuse_unknown(config: DictConfig, cluster: Cluster, profile: Profile | None) -> None:
    """Raise SettingError for a device of ``cluster`` without a speed that neither ``profile`` nor the catalogue knows.

    If ``profile`` is None, the model is measured later, on devices of this machine.
    """
    unsaid = (slot.device for slot in cluster.slots if slot.device.speed == 1.0)
    if not (names := [device.name for device in unsaid if known(device.name) is None]):
        return
    timed = sorted(profile.times if profile else {"cpu", *(slot.device.name for slot in _discovered().slots)})
    if (name := next((name for name in names if name not in timed), None)) is None:
        return
    listed = ", ".join(timed)
    nowhere = (
        f"neither in the profile, which has {listed}," if profile else f"neither a device of this machine ({listed})"
    )
    nowhere, alike = f"{nowhere} nor in the catalogue of GPUs", nearest_gpu(name, [*gpus(), *timed])
    if config.devices is not None:
        raise SettingError(f"devices=[{name}] is {nowhere}{alike}")
    if config.cluster is None:
        source = "the model's profile" if config.profile is None else f"profile={config.profile}"
        raise SettingError(
            f"{source} has no times of this machine's '{name}', but of {listed}; say which devices to plan for, as in"
            " devices=[RTX-3090,T4], or cluster=mixed_box."
        )
    if len(timed) == 1:
        way_out = alike or "; profile the model on it, or say its speed"
        raise SettingError(f"cluster has the device '{name}', which is {nowhere}{way_out}")


def with_memory(cluster: Cluster, profile: Profile) -> tuple[Cluster, set[DeviceSlot]]:
    """Return ``cluster`` with the memories that are known, and its devices whose memory comes from a data sheet."""
    measured = cluster.with_memory(profile.memory, catalogue=False)
    filled = measured.with_memory(profile.memory)
    pairs = zip(measured.slots, filled.slots, strict=True)
    return filled, {other for one, other in pairs if one.device.memory != other.device.memory}


def allocation_of(config: DictConfig, cluster: Cluster) -> str | None:
    """Return the allocation for a plan of all virtual workers, or None for a plan of one virtual worker.

    If none is given, compare all allocations of a cluster of several nodes. ``strategy.virtual_workers=1``,
    ``ordered=true`` and ``synchronise`` ask for a plan of one virtual worker.

    Raises:
        SettingError: if settings exclude each other.
    """
    single = [each for each in ("strategy.virtual_workers", "ordered", "synchronise") if _is_given(each)]
    single = [each for each in single if each != "ordered" or config.ordered]
    if not _is_given("strategy.allocation"):
        if len(cluster.nodes) == 1 or single:
            return None
        allocation = COMPARE
    elif single:
        raise SettingError(
            f"{single[0]}={written(OmegaConf.select(config, single[0]))} is for a plan of one virtual worker; leave it"
            f" out, or strategy.allocation={config.strategy.allocation}."
        )
    else:
        allocation = config.strategy.allocation
    if isinstance(shares := config_checks.synchronisation(config).shares, tuple):
        raise SettingError(
            f"strategy.wsp.shares={[*shares]} is what a plan of several virtual workers decides; give equal, or auto,"
            " or strategy.virtual_workers=1 for a plan of one."
        )
    if config.split:
        raise SettingError(
            f"split={written(config.split)} joins devices of one virtual worker, and this plan is for several; set"
            " strategy.virtual_workers=1, or leave split out"
        )
    return allocation


def of_strategy(config: DictConfig, key: str) -> Any:
    """Return a setting of the strategy, or its default if another strategy is configured."""
    return OmegaConf.select(config, f"strategy.{key}", default=declared(HetPipeArguments).parameters[key].default)


def _is_given(setting: str) -> bool:
    """Return whether the command line gives ``setting``. Values of an experiment do not count."""
    return any(each.lstrip("+").startswith((f"{setting}=", f"{setting}.")) for each in HydraConfig.get().overrides.task)


def given_stages(config: DictConfig) -> int | None:
    """Return the number of stages that the command line gives. An experiment's stages are for runs without a plan."""
    stages = of_strategy(config, "stages") if _is_given("strategy.stages") else "auto"
    return stages if isinstance(stages, int) else None


def problem_of(
    config: DictConfig, profile: Profile, cluster: Cluster, optimizer: str | float
) -> tuple[PlanningProblem, int | None]:
    """Return the planning problem of one virtual worker on all devices of ``cluster``, and Nm, or None to choose it."""
    in_flight = of_strategy(config, "in_flight")
    problem = PlanningProblem(
        profile,
        cluster,
        optimizer=optimizer,
        ordered=config.ordered,
        recompute=of_strategy(config, "recompute"),
        stages=given_stages(config),
        synchronise=seconds_of(config.synchronise, "synchronise"),
        every=OmegaConf.select(config, "trainer.accumulate_grad_batches", default=None) or 1,
        spread=not of_strategy(config, "compile"),
    )
    return problem, None if in_flight == "auto" else in_flight
