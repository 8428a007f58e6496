"""A hint how a tensor is laid out in memory."""

from popxl_addons.ops.linear_layout.linear_layout import linear_layout
