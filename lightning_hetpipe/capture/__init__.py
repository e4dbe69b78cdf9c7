"""From a LightningModule to pieces, layers and stages: what is pipelined, found by watching one minibatch."""
