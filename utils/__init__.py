"""Small stateless helpers: logging, units, the page generator, and `runtime.py`, the one door to
popxl.extensions.

May import `config`, `popxl` and `popxl_addons`. A helper with one caller belongs to its caller.
"""
