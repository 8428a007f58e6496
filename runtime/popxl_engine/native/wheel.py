"""Commands of setuptools, which alone imports this: a wheel holds the kernels compiled, where it is
built with a C++ compiler on Linux and x86-64.

``POPXL_NATIVE=0`` builds one without, for any machine.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SHIP = "import sys; from popxl_engine.native import build; build.ship(build.Path(sys.argv[1]))"


class BuildPython(build_py):
    """Copies the packages, and compiles the kernels beside them, but for an editable install."""

    has_kernels = False

    def run(self) -> None:
        """Build into `build_lib`."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "popxl_engine/native/compiled"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier wheel
        if os.environ.get("POPXL_NATIVE", "1") != "0":
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
            subprocess.run([sys.executable, "-c", SHIP, folder], env=environment, check=True)
        self.has_kernels = any(folder.glob("*.so"))


class BuildWheel(bdist_wheel):
    """Names the platform of a wheel with compiled kernels, which are of no one Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """The names of Python, its binary interface, and the platform."""
        python, interface, where = super().get_tag()
        if where == "any" and self.get_finalized_command("build_py").has_kernels:
            where = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        return python, interface, where
