"""The private names of torch that this package touches, in one place; ``tests/private`` guards each.

The docstring of each module says what happens where torch has a name no longer. Whatever fails there raises an
ImportError or an AttributeError that holds the name, unless the docstring says otherwise.
"""

import torch

from lightning_hetpipe.errors import warn_if_untested

warn_if_untested("torch", torch.__version__)
