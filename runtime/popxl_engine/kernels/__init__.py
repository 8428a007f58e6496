"""One torch function per op, in the same family files as ``popxl/ops``. Importing this package
registers them all.

To add a kernel: put ``@kernel("name")`` over a function with the op's own parameters, in the
family's file.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
