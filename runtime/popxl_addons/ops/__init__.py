"""Ops of the add-ons: compositions of PopXL's, or PopXL's with another gradient. Those that are not
here are imported.

Each is a package with a module of the same name, which holds it: programs know both paths.
"""

from popxl_addons.ops.cross_entropy import cross_entropy, cross_entropy_with_grad
from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale
from popxl_addons.ops.streams import host_load, host_store
