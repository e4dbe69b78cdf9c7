"""Three GPUs that do not match, emulated on a CPU: `python examples/mixed_devices.py --picture timeline.png`."""

import argparse

import lightning as L

from lightning_hetpipe import Cluster, HetPipeStrategy, Node
from lightning_hetpipe.demo import GPT, SourceText
from lightning_hetpipe.reporting.plots import draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--picture", help="where to draw the timeline, such as timeline.png; by default nowhere")
    given = parser.parse_args()

    L.seed_everything(1)
    box = Cluster([Node("box", ["RTX-3090", "RTX-2080-Ti", "Quadro-RTX-4000"], link="12 GB/s")])
    strategy = HetPipeStrategy(cluster=box, timeline=given.picture is not None)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=given.max_steps, logger=False, enable_checkpointing=False
    )
    model, data = GPT(width=64, blocks=12), SourceText(max_bytes=200_000)
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    print(strategy.last_run)
    if strategy.last_run.timeline is not None:
        figure = draw(strategy.last_run.timeline)
        figure.set_size_inches(11, 4.5)
        figure.savefig(given.picture)


if __name__ == "__main__":
    main()
