"""Runs as one page: `python demo/report.py runs/a runs/b`. See --help."""

import signal
import sys
from pathlib import Path

# run as a script: the repository's packages are beside this folder, not in it
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # while modules load, Ctrl-C ends the process without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from popxl_gpt.config import UserError, exit_on_user_error, parse_options
from popxl_gpt.config.schema import PathText
from popxl_gpt.config.texts import user_path
from popxl_gpt.execution.reports.run.report import write_report
from popxl_gpt.execution.reports.run.run_files import REPORT, read_run


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Which runs, and where the page goes."""

    runs: tuple[PathText, ...]
    """Folders of runs, such as runs/demo; several are laid over each other."""
    output: Optional[PathText] = None
    """File of the page; none: report.html in the run's folder, or in this one for several runs."""


def main(arguments: Sequence[str]) -> int:
    """Write the page as the command line says. Returns the exit code."""
    options = parse_options(
        arguments, program="demo/report.py: runs as a page", options=Options, words="runs"
    )
    folders = [user_path("runs", name) for name in options.runs]
    runs = [read_run(folder) for folder in folders]
    default = folders[0] / REPORT if len(runs) == 1 else Path(REPORT)
    path = Path(options.output) if options.output else default
    try:
        write_report(runs, path)
    except OSError as error:
        raise UserError(
            f"--output: got {path}: {error.strerror}; expected a file that can be written. Choose "
            "another."
        ) from error
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main(sys.argv[1:]))
