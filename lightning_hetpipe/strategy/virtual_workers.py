"""Virtual workers: their settings, this process's rank, and how all start, meet, share data, agree and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import lightning as L
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hetpipe.errors import SettingError, VirtualWorkerLost
from lightning_hetpipe.launch import node_hosts, servers
from lightning_hetpipe.launch.ends import REASON, ToldToEnd
from lightning_hetpipe.launch.launcher import Launcher, WasLeftOut, check_processes
from lightning_hetpipe.launch.parent_watch import this_child
from lightning_hetpipe.launch.ranks import Rank, WorkerRange, announce, count_nodes, find_rank
from lightning_hetpipe.launch.servers import LaunchSettings, ServingNodes
from lightning_hetpipe.launch.wsp_settings import WSPSettings
from lightning_hetpipe.lightning_private import callbacks_of, recount_batches, train_loaders
from lightning_hetpipe.planning.model.cluster import Cluster
from lightning_hetpipe.planning.plan.document import Plan
from lightning_hetpipe.rules.waves import whole_steps
from lightning_hetpipe.run.together import check_returning
from lightning_hetpipe.server.process.signals import TERMINATED
from lightning_hetpipe.settings import seconds
from lightning_hetpipe.strategy import relations
from lightning_hetpipe.strategy.arguments import WSPArguments
from lightning_hetpipe.workers import collectives, program_group
from lightning_hetpipe.workers.shared_data import Shares, deal_among, let_be_long
from lightning_hetpipe.workers.synchroniser import NoSynchroniser, Synchroniser

if TYPE_CHECKING:
    from lightning_hetpipe.workers.group import Group

T = TypeVar("T")


class WSPCallback(WSPArguments, L.Callback):
    """Settings of the synchronisation of virtual workers, given to the Trainer as a callback, or to the strategy.

    The synchronisation is Wave Synchronous Parallel (HetPipe, section 5).

    Args:
        clock_distance: D, the number of waves that a virtual worker may be ahead of the slowest one. None is the
            plan's, or 0.
        wave: W, minibatches per wave. "auto" is the plan's, or Nm.
        shares: Minibatches per wave of each virtual worker, in proportion to which each epoch is dealt
            (docs/virtual-workers.md#unequal-virtual-workers). "auto" measures their rates in each epoch, and ``wave``
            is the shortest wave. None is the plan's unless ``wave`` is set, or "equal".
        aggregate: "sum" adds the updates of virtual workers (the paper's rule, which acts like an N times larger
            learning rate), "mean" their mean.
        update_dtype: Dtype in which updates travel. "bfloat16" halves them. The rounding error is added to the next
            update. None is the dtype of each parameter.
        servers: Addresses of running ``hetpipe-server``s. By default each machine starts one.
        placement: Server of each parameter: "size" balances their bytes, "round_robin" deals parameters out in turn.
            "local" leaves each parameter beside virtual worker 0's stage that has it, which is the first machine's
            server unless its stages are on several machines. With "local", weights survive without other machines, but
            one link may carry everything. None is the plan's, or "size".
        security: Certificates and token of the servers (docs/several-machines.md#secrets). What is left out comes from
            the environment variables ``HETPIPE_*``.
        lease: Time that a virtual worker may be silent before the others go on without it.
        end_timeout: Time that the first process of a machine, at its end, waits for the programs of other virtual
            workers. Then it ends the programs that it has started, and exits with 1. None waits as long as they run.
        join_timeout: Time that virtual workers wait, at the start and at the start of each fit, for one that has not
            come. Then all end, and the error says who is missing.
        restarts: Times that a virtual worker whose process ends in the middle of a run is started again, by the process
            that started it. It comes back when the next epoch begins (docs/virtual-workers.md#coming-back). Under
            ``hetpipe-train`` on one machine it counts for the run as well. If virtual worker 0 is lost, the run is
            started again from its newest checkpoint (docs/virtual-workers.md#when-virtual-worker-0-is-lost).

    Raises:
        SettingError: one sentence that names the setting, its value and the way out.
    """


class VirtualWorkers:
    """Virtual workers of a run, from this process's view. Each is one process, without torch's process group.

    ``in_flight`` returns Nm of the running training.
    """

    def __init__(self, given: SimpleNamespace, plan: Plan | None, in_flight: Callable[[], int]) -> None:
        this_child()  # from here on, a child of our launcher ends with the launcher
        each, hosts = given.virtual_workers, given.stage_hosts
        self.asked: int | WorkerRange = each if isinstance(each, int) else WorkerRange(*each)
        self.wsp: WSPCallback | None = given.wsp
        self.timeout, self.plan, self._in_flight = seconds(given.timeout), plan, in_flight
        self.hosts: relations.StageHosts = hosts and {str(node): address for node, address in hosts.items()}
        self.group: Group | None = None  # once they have met
        self.synchroniser: Synchroniser | NoSynchroniser = NoSynchroniser()
        self.shares: Shares | None = None
        self.recorded: tuple[int, ...] | None = None  # shares of the checkpoint that is loaded
        self.failure: BaseException | None = None
        self.cluster: Cluster | None = given.cluster
        self._waiting_call: str | None = None
        self._launcher: Launcher | None = None

    # This process among them.

    def set_environment(
        self, by: ClusterEnvironment | None, devices: Sequence[torch.device] | None, num_nodes: int
    ) -> None:
        """Note the Trainer's cluster environment ``by``, its devices and its number of nodes."""
        self.devices, self._num_nodes = devices or [torch.device("cpu")], num_nodes
        self._environment = by or LightningEnvironment()
        self._rank: Rank | None = None

    @property
    def rank(self) -> Rank:
        if self._rank is None:
            planned = list[int]()
            if self.plan is not None:
                nodes = count_nodes(self._num_nodes, self._environment)
                planned = relations.workers_as_planned(self.asked, self.plan, self._is_emulated, self.hosts, nodes)
            self._rank = find_rank(self.asked, self._num_nodes, self._environment, planned)
        return self._rank

    @property
    def is_on_cpu(self) -> bool:
        return all(device.type == "cpu" for device in self.devices)

    @property
    def _is_emulated(self) -> bool:
        """True if all devices of the plan are emulated on this machine, whatever their nodes."""
        return self.cluster is not None and count_nodes(self._num_nodes, self._environment) == 1 and self.is_on_cpu

    @property
    def _trainer(self) -> L.Trainer | None:
        return getattr(self._launcher, "trainer", None)

    # Their start.

    def launcher(self) -> Launcher | None:
        """Make the launcher if the run has several processes, or if this node only serves stages."""
        rank = self.rank
        check_processes(rank)
        self._launcher = None
        if rank.size > 1 or rank.nodes > 1:
            self._launcher = Launcher(
                rank,
                self._serve_children,
                self.settings,
                lambda: node_hosts.serve(self._launch()),
                on_end=program_group.note_end,
                closed=program_group.end,
                resumed_from=self._resumed_from,
            )
            announce(rank)
        return self._launcher

    def _resumed_from(self) -> Path | None:
        """Return the checkpoint from which a process resumes that comes back to a run, else None."""
        if self.rank.index == 0:
            return None
        self.meet()
        returning = None if self.group is None else self.group.seats.returning
        if returning is None:
            return servers.resumed_from()
        check_returning(self._trainer, self.rank.index)
        return returning.checkpoint

    def _serve_children(self) -> dict[str, str]:
        """Start this launch's server, unless servers are given. Return environment variables for children."""
        self.check_shares()
        launch = self._launch()
        node_hosts.start(launch)
        return servers.start(launch)

    def _launch(self) -> LaunchSettings:
        return LaunchSettings(self.rank, self._environment, self.settings(), self.timeout, self._serving_nodes())

    def _serving_nodes(self) -> ServingNodes | None:
        """Return the plan's nodes, if the program is to start hosts for stages led from other nodes, else None."""
        if self.plan is None or self._is_emulated or self.hosts is not None:
            return None
        served = {node: self.plan.served(node) for node in self.plan.workers_on_nodes}
        stages = {
            node: ", ".join(f"stage {stage} of virtual worker {worker}" for worker, stage in its)
            for node, its in served.items()
            if its
        }
        return ServingNodes((*served,), stages, self.plan.fingerprint) if stages else None

    def find_hosts(self) -> node_hosts.FoundHosts | None:
        """Find the addresses of this launch's nodes with hosts, or return None without such nodes."""
        return node_hosts.find(self._launch())

    def settings(self) -> WSPSettings:
        """Return the settings of the strategy's or the Trainer's WSPCallback. A plan replaces defaults."""
        given = callbacks_of(self._trainer, WSPCallback)
        if self.wsp is not None and self.wsp not in given:
            given.append(self.wsp)
        wsp = (relations.only_wsp(given) or WSPCallback()).settings
        return wsp if self.plan is None else relations.wsp_as_planned(wsp, self.plan)

    def check_shares(self) -> None:
        """Refuse shares for another number of virtual workers."""
        shares = self.settings().shares
        if isinstance(shares, tuple) and len(shares) != self.rank.size:
            raise SettingError(
                f"shares={list(shares)!r} has {len(shares)} entries, and {self.rank.size} virtual"
                f" worker{'s' if self.rank.size > 1 else ''} train; give one for each, or leave shares out"
            )

    # The life of a run.

    def meet(self) -> None:
        """Meet the other virtual workers, if any. In a later run of the program, they are together already."""
        self.failure = None
        self.check_shares()
        hosts = self.find_hosts()
        if self.rank.size == 1:
            return
        launch = self._launch()
        if self.plan is not None and (said := relations.other_than_planned(launch.wsp, self.plan)):
            rank_zero_info(said)
        self.group = program_group.meet(launch, () if hosts is None else hosts.servers)
        self.group.interrupted = lambda: self._trainer is not None and bool(self._trainer.interrupted)
        collectives.share(self._share)

    def divide(self, trainer: L.Trainer) -> None:
        """Decide the shares of the data in a run of ``trainer``, before its loaders are made."""
        given = self.group.settings.shares if self.group is not None else "equal"
        recorded, self.recorded, self.shares = self.recorded, None, None
        if recorded is not None and given not in ("auto", recorded):
            rank_zero_info(
                f"the checkpoint was saved with shares={list(recorded)}, and this run goes on with"
                f" shares={list(given) if isinstance(given, tuple) else given!r}"
            )
        if given == "equal":
            return
        if trainer.limit_train_batches != 1.0 or isinstance(trainer.limit_train_batches, int):
            rank_zero_info(
                "shares stay equal: limit_train_batches, overfit_batches and fast_dev_run give all virtual workers as"
                " many batches"
            )
            return
        if callbacks_of(trainer, LearningRateFinder):
            rank_zero_info("shares stay equal: a search for a learning rate waits for all after every step")
            return
        if self.rank.index:
            let_be_long(trainer)
        recorded = None if recorded is None else whole_steps(recorded, trainer.accumulate_grad_batches)
        lengths = given if isinstance(given, tuple) else recorded
        self.shares = Shares(self.rank.index, self.rank.size, lengths, given == "auto")

    def deal(self, dataloader: object) -> None:
        """Give the share of this virtual worker to a ``dataloader`` whose sampler Lightning has made."""
        if self.shares is not None:
            self.shares.deal(dataloader)
        if self.group is not None and len(self.group.seats.taken) < self.group.size:
            deal_among(self.group.seats.taken, self.rank.index, dataloader)

    def enter(
        self,
        trainer: L.Trainer,
        in_flight: object,
        weights: str,
        lr_correction: object,
        save_for_returning: Callable[[Path], None],
    ) -> Synchroniser | NoSynchroniser:
        """Begin a fit with the other virtual workers. Refuse a fit if their strategies have other settings."""
        if self.group is None:
            return NoSynchroniser()
        synchroniser = Synchroniser(self.group, trainer.lightning_module, self.shares)
        wsp = self.group.settings
        if wsp.aggregate == "sum":
            number = f"up to {self.group.size}" if self.rank.least else str(self.group.size)
            rank_zero_warn(
                f"the updates of {number} virtual workers are added, which acts like a learning rate {number} times as"
                " large; lower it, or set WSPCallback(aggregate='mean')"
            )
        agreed = [f"in_flight={in_flight}", f"wave={wsp.wave}", f"update_dtype={wsp.update_dtype}"]
        agreed += [f"weights={weights}", f"lr_correction={lr_correction}", f"placement={wsp.placement}"]
        agreed.append(f"checksum of plan={None if self.plan is None else self.plan.fingerprint}")
        agreed.append(f"shares={self.shares or 'equal'}")
        synchroniser.enter(agreed)
        if self.group.seats.returning is not None:
            let_be_long(trainer)
            for loader in train_loaders(trainer):  # made before this process had a seat
                deal_among(self.group.seats.taken, self.rank.index, loader)
            if train_loaders(trainer):
                recount_batches(trainer)
        synchroniser.save_for_returning = save_for_returning
        self.synchroniser = synchroniser
        return synchroniser

    # Calls that all make.

    def together(self, what: str) -> Group | None:
        """Return the group for a call of ``what`` that all virtual workers make, or None for one virtual worker."""
        if self.group is not None:
            if collectives.runs_ahead(self._in_flight()):
                raise collectives.ahead(what)
            is_logging = collectives.is_logging()
            if isinstance(self.synchroniser, Synchroniser) and not self.synchroniser.meet():
                what = "self.log(..., sync_dist=True) at every step" if is_logging else what
                raise SettingError(
                    f"{what} waits for the other virtual workers within a wave, where those with other shares are at"
                    " other places; call it at the end of an epoch or in a validation (log with on_step=False,"
                    " on_epoch=True), or set WSPCallback(shares='equal')"
                )
            if not is_logging:
                self._waiting_call = what
        return self.group

    def call(self, what: str, function: Callable[..., T], own: T, *more: Any) -> T:
        """Return ``function(group, own, *more)``, in a call of ``what`` that all make. With N = 1, return ``own``."""
        group = self.together(what)
        return own if group is None else function(group, own, *more)

    def waited_in(self) -> str | None:
        """Return and forget the last call in which virtual workers waited for each other, other than ``self.log``'s."""
        call, self._waiting_call = self._waiting_call, None
        return call

    def _share(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Return the ``tensor`` of every virtual worker, for a metric."""
        group = self.together(what)
        return [tensor] if group is None else collectives.everyones(group, tensor, what)

    def agreed(self, value: T) -> T:
        """Return virtual worker 0's ``value``. This does not count as a call of ``strategy.broadcast``."""
        if self.group is None:
            return value
        given: T = collectives.broadcast(self.group, value, 0)
        return given

    # Their end.

    def fail(self, exception: BaseException) -> None:
        """Note that ``exception`` ends the run."""
        self.failure = exception
        if isinstance(exception, SIGTERMException) and exception.code is None:  # else a script would end with 0
            exception.code = TERMINATED

    def leave(self) -> None:
        """Leave a fit. Virtual workers stay together to the program's end, unless this virtual worker has failed."""
        self.synchroniser, self.recorded = NoSynchroniser(), None
        group, failure = self.group, self.failure
        if group is None:
            return
        if failure is None:
            group.leave_fit()
            return
        self.group = None
        collectives.share(None)
        if isinstance(failure, ToldToEnd):
            told = "" if self.rank.index else f"{SIGTERMException.__name__}: it was {REASON}"  # for others that wait
            group.part(told, why=REASON if failure.alone else "")
        elif isinstance(failure, VirtualWorkerLost) and failure.how and group.index:
            group.part(why=failure.how)
        else:
            group.part(f"{type(failure).__name__}: {failure}", isinstance(failure, VirtualWorkerLost | WasLeftOut))
