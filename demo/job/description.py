"""`run.json`: with what a run started: program, data, machine."""

import json
import logging
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import popdist
from poprun.cores import usable_cores

from popxl_gpt.config.schema import Config
from popxl_gpt.data.dataset import Dataset
from popxl_gpt.data.mixture import MixedDataset
from popxl_gpt.demo.job.run_folder import RunFolder
from popxl_gpt.execution.planning.model_size import flops_per_step, parameter_count
from popxl_gpt.execution.planning.parameter_groups import parameter_groups
from popxl_gpt.utils.files.whole import write_whole
from popxl_gpt.utils.runtime import host_bytes

PACKAGES = ("popxl-runtime", "torch", "numpy")
_LOG = logging.getLogger(__name__)


def describe(
    folder: RunFolder,
    config: Config,
    data: Dataset,
    validation_data: Dataset | None,
    seconds: "Mapping[str, float] | None" = None,
) -> None:
    """Write the file; training goes on where the disk does not take it.

    Args:
        seconds: that the program took before the first step, by what for.
    """
    values: dict[str, Any] = {
        "started": datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": sys.argv,
        "model": {
            "parameters": parameter_count(config.model),
            "flops_per_step": round(flops_per_step(config)),
            "tokens_per_step": config.tokens_per_step,
        },
        "parameters": [asdict(group) for group in parameter_groups(config)],
        **({} if seconds is None else {"program": seconds}),
        "training_data": _data(data, config.data.input_files, config.data.mixed()),
        **(
            {"validation_data": _data(validation_data, config.data.validation_files)}
            if validation_data is not None
            else {}
        ),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions()},
    }
    try:
        write_whole(folder.about, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        _LOG.warning(
            "%s: not written: '%s'. The report lacks program, data and machine.",
            folder.about,
            error.strerror,
        )


def machine() -> "dict[str, Any]":
    """This machine: processor, cores and bytes that this process may use, processes of the run."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": host_bytes()[0],
        "processes": popdist.getNumInstances(),
        "system": platform.platform(),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def versions() -> "dict[str, str]":
    """The versions of what computes, by package."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from its source alone
            continue
    return found


def _data(
    data: Dataset, files: "tuple[str, ...]", mix: "Mapping[str, float] | None" = None
) -> "dict[str, Any]":
    facts = {"samples": len(data), "fingerprint": data.fingerprint}
    if mix and isinstance(data, MixedDataset):
        parts = {
            name: {"weight": weight, **_data(source, (name,))}
            for (name, weight), source in zip(mix.items(), data.sources)
        }
        return {"mixture": parts, **facts}
    return {"files": list(files) or "random tokens", **facts, **(data.info or {})}
