"""From a LightningModule to pieces, layers and stages: one watched minibatch shows what is pipelined."""
