"""A LightningModule trained as a pipeline of three stages, in plain Python: `python examples/digits.py`."""

import lightning as L

from lightning_hetpipe import HetPipeStrategy
from lightning_hetpipe.demo import Digits, ResNet


def main() -> None:
    L.seed_everything(1)
    model, data = ResNet(), Digits()
    strategy = HetPipeStrategy(stages=3, in_flight=4)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", max_epochs=15, logger=False)
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)
    print(strategy.last_run)


if __name__ == "__main__":
    main()
