"""The private names of torch that this package uses, in one place. ``tests/private`` guards each name.

The docstring of each module describes what happens without a name. Each failure there is an ImportError or an
AttributeError that contains the name, unless the docstring says otherwise.
"""

import torch

from lightning_hetpipe.errors import warn_if_untested

warn_if_untested("torch", torch.__version__)
