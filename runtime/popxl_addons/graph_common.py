"""Types of graphs and of their gradients, as arguments of transforms take them."""

from collections.abc import Mapping

import popxl
from popxl.transforms.autodiff import GradGraphInfo

from popxl_addons.graph import CalledGraphsGradInfo, GraphWithNamedArgs

GraphLike = popxl.Graph | GraphWithNamedArgs
GradGraphInfoLike = GradGraphInfo | GraphWithNamedArgs
CalledGraphsGradInfoLike = Mapping[GraphLike, GradGraphInfoLike]

__all__ = ["CalledGraphsGradInfo", "CalledGraphsGradInfoLike", "GradGraphInfoLike", "GraphLike"]
