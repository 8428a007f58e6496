"""Runs as one page: `python demo/report.py runs/a runs/b`. See --help."""

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run by its path: the packages are beside this folder
        sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from popxl_gpt.demo import commands

    commands.report()

from collections.abc import Sequence

from popxl_gpt.demo.commands import ReportOptions, parse_report
from popxl_gpt.execution.reports.run.report import write_report
from popxl_gpt.execution.reports.run.run_files import REPORT, read_run
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.texts import user_path


def main(arguments: Sequence[str]) -> int:
    """Write the page as the command line says. Returns the exit code."""
    return run(parse_report(arguments))


def run(options: ReportOptions) -> int:
    """Write the page as asked. Returns the exit code."""
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
