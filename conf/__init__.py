"""The Hydra configuration of hetpipe-train, installed as the package lightning_hetpipe.conf."""
