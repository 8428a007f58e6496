"""Graph in, graph out. May import the core and the ops.

To add a transform: one file here with one public function, its line below, and
``test_transforms_<name>.py``.
"""

from popxl.transforms.autodiff import (
    ExpectedConnection,
    ExpectedConnectionType,
    GradGraphInfo,
    autodiff,
)
from popxl.transforms.clone import clone_ops, prune, remove_ops
from popxl.transforms.decompose_sum import decompose_sum
from popxl.transforms.merge_exchange import io_tile_exchange, merge_exchange
from popxl.transforms.outline import outline
