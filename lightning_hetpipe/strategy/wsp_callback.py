"""Wave Synchronous Parallel: synchronisation of virtual workers (HetPipe, section 5)."""

from __future__ import annotations

import lightning as L

from lightning_hetpipe.strategy.arguments import WSPArguments


class WSPCallback(WSPArguments, L.Callback):
    """Settings of the synchronisation of virtual workers; given to the Trainer as a callback, or to the strategy.

    Args:
        clock_distance: D, the number of waves that a virtual worker may be ahead of the slowest one. None is the
            plan's, or 0.
        wave: W, minibatches per wave. "auto" is the plan's, or Nm.
        shares: Minibatches per wave of each virtual worker, in proportion to which each epoch is dealt
            (docs/virtual-workers.md#unequal-virtual-workers). "auto" measures their rates in each epoch, and ``wave``
            is the shortest wave. None is the plan's unless ``wave`` is set, or "equal".
        aggregate: "sum" adds the updates of virtual workers (the paper's rule, which acts like an N times larger
            learning rate), "mean" their mean.
        update_dtype: Dtype in which updates travel; "bfloat16" halves them. The rounding error is added to the next
            update. None is the dtype of each parameter.
        servers: Addresses of running ``hetpipe-server``s; by default each machine starts one.
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
            ``hetpipe-train`` on one machine it counts for the run as well, which is started again from its newest
            checkpoint if virtual worker 0 is lost (docs/virtual-workers.md#when-virtual-worker-0-is-lost).

    Raises:
        SettingError: one sentence that names the setting, its value and the way out.
    """
