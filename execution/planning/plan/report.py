"""`--plan`: what a run would need of memory, traffic and time, printed and written to files."""

import json
from pathlib import Path
from typing import Any

import popdist

from popxl_gpt.config.schema import Config
from popxl_gpt.execution.planning.memory import Build
from popxl_gpt.execution.planning.options import PlanOptions
from popxl_gpt.execution.planning.plan.layouts import fastest_layouts, layouts_text, layouts_values
from popxl_gpt.execution.planning.plan.run_plan import RunPlan, make_run_plan
from popxl_gpt.execution.planning.plan.text import plan_text
from popxl_gpt.execution.planning.plan.values import plan_values
from popxl_gpt.utils.files.output_folder import written_to
from popxl_gpt.utils.files.whole import written_whole


def write_plan(found: RunPlan, folder: Path) -> None:
    """Write `plan.json`; OSError where that fails."""
    _write(plan_values(found), folder / "plan.json")


def _write(values: Any, path: Path) -> None:
    with written_whole(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def plan_and_show(
    build: Build, config: Config, options: PlanOptions, validation: Build | None = None
) -> None:
    """Print a plan, and write it as JSON. In a run of several processes the first one does it."""
    if popdist.getInstanceIndex() != 0:
        return
    folder = (
        Path(options.plan_folder)
        if options.plan_folder
        else Path(config.logging.run_folder) / f"{config.name}-plan"
    )
    with written_to(folder, "--plan_folder"):
        folder.mkdir(parents=True, exist_ok=True)
    if options.devices is not None:
        search = fastest_layouts(build, config, options)
        print(layouts_text(search), end="\n\n")
        config = search.shown[0].config
    found = make_run_plan(build, config, options, validation)
    print(plan_text(found))
    with written_to(folder, "--plan_folder"):
        write_plan(found, folder)
        if options.devices is not None:
            _write(layouts_values(search), folder / "layouts.json")
    print(f"\nwritten to {folder}")
