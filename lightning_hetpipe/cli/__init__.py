"""Console scripts: Hydra applications over the package lightning_hetpipe.conf."""
