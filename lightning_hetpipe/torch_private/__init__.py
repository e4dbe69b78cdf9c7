"""The private names of torch that this package touches, in one place; ``tests/private`` guards each."""

import torch

from lightning_hetpipe.errors import warn_if_untested

warn_if_untested("torch", torch.__version__)
