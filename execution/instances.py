"""What the processes of a run agree on before they start."""

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import popdist

from popxl_gpt.config.saving import to_yaml
from popxl_gpt.config.schema import Config
from popxl_gpt.config.validation import validate
from popxl_gpt.execution.host import data_share
from popxl_gpt.utils.errors import UserError
from popxl_gpt.utils.log import set_up_logging
from popxl_gpt.utils.runtime import count_here, expect_replicas, gather

PACKAGES = (
    *(
        f"popxl_gpt.{name}"
        for name in ("config", "data", "demo", "execution", "modelling", "utils")
    ),
    *("popart", "popdist", "poprun", "popxl", "popxl_addons", "popxl_engine"),
)
"""The packages whose sources processes compare, each by itself: in a checkout those of the
application are links.
"""
SOURCES = (".py", ".cpp", ".h")
LIBRARIES = ("torch", "numpy")
"""The libraries that the numbers come from."""
DESCRIPTIONS = ("checkpoint.json", "config.json")
"""The files that say what the weights beside them are."""

SAMPLED = 2**16
"""Bytes of each end of a file of weights that are compared."""


def check_launch() -> None:
    """UserError where the launcher's variables cannot be used."""
    try:
        popdist.getInstanceIndex(), popdist.getNumTotalReplicas()
    except (RuntimeError, ValueError) as error:
        raise UserError(str(error)) from error


def check_instances(config: Config) -> bool:
    """Whether this process is instance 0, which speaks for all.

    Raises:
        UserError: the launcher's variables do not fit the configuration, not all processes came, or
            configuration or code are not the same in all.
    """
    check_launch()
    expect_replicas(config.execution.replication_factor)
    is_leader = popdist.getInstanceIndex() == 0
    set_up_logging(is_leader, config.logging.log_level)
    if popdist.isPopdistEnvSet():
        validate(config, replicas=popdist.getNumTotalReplicas())
        data_share(config)
        try:
            popdist.init()
        except (RuntimeError, ValueError) as error:
            raise UserError(str(error)) from error
    if popdist.getNumInstances() > 1:
        _check_same(to_yaml(config), code_hashes())
    return is_leader


def check_same_checkpoint(folder: Path, flag: str = "--checkpoint") -> None:
    """UserError unless all processes have found one checkpoint, or one model of Hugging Face's: a
    run may save, or delete, while they look for its newest, and machines may have copies.
    """
    found = gather((folder.name, _contents_of(folder)), patiently=True)
    first, first_contents = found[0]
    for number, (name, contents) in enumerate(found):
        if name != first:
            raise UserError(
                f"{flag}: got {name} in instance {number} and {first} in instance 0; expected one "
                "checkpoint. Its run saves meanwhile, or machines have others: name the checkpoint."
            )
        if contents != first_contents:
            raise UserError(
                f"{flag}: got another {name} in instance {number} than in instance 0; "
                "expected the same weights in all. Name one that all machines see, or copy it to "
                "all of them."
            )


def _contents_of(folder: Path) -> str:
    """Names what a folder of weights holds, by the file that describes them, which has hashes of a
    checkpoint's files, and by the sizes, beginnings and ends of others; "" where it cannot be read,
    which is told elsewhere.
    """
    facts = hashlib.sha256()
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            if path.suffix == ".safetensors":
                size = path.stat().st_size
                facts.update(f"{path.name} {size}\n".encode())
                with open(path, "rb") as file:
                    for start in (0, max(0, size - SAMPLED)):
                        file.seek(start)
                        facts.update(file.read(SAMPLED))
            elif path.name in DESCRIPTIONS:
                facts.update(path.read_bytes())
        return facts.hexdigest()[:16]
    return ""


def check_same_data(fingerprints: "Mapping[str, str]") -> None:
    """UserError unless all processes read the same data: each trains on its share of them, and
    machines may have copies.

    Args:
        fingerprints: of data sets, by what is told of them.
    """
    found = gather(dict(fingerprints), patiently=True)
    for number, theirs in enumerate(found):
        for name, fingerprint in theirs.items():
            if fingerprint != found[0].get(name):
                raise UserError(
                    f"{name}: got other data in instance {number} than in instance 0; expected the "
                    "same files in all. Name files that all machines see, or copy them to all of "
                    "them."
                )


def _check_same(text: str, code: "dict[str, str]") -> None:
    found = gather((text, code), patiently=True)
    first_text, first_code = found[0]
    for number, (text, code) in enumerate(found):
        for ours, theirs in zip_longest(first_text.splitlines(), text.splitlines(), fillvalue=""):
            if ours != theirs:
                raise UserError(
                    f"instances: got '{theirs.strip()}' in instance {number} and '{ours.strip()}' "
                    "in instance 0; expected one configuration. Start all with the same command "
                    "line."
                )
        different = sorted(
            name
            for name in first_code.keys() | code.keys()
            if first_code.get(name) != code.get(name)
        )
        if different:
            raise UserError(
                f"instances: got another {different[0]} in instance {number} than in instance 0 "
                f"({len(different)} files or versions differ); expected the same code. Start all "
                "from one version of it."
            )


def code_hashes() -> "dict[str, str]":
    """Hashes of the files of our packages, by package and place in it, and the versions of
    libraries.
    """
    hashes = {}
    for library in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            hashes[f"version of {library}"] = importlib.metadata.version(library)
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in Path(folder).rglob("*"):
                if path.suffix in SOURCES:
                    name = f"{package.rpartition('.')[2]}/{path.relative_to(folder)}"
                    hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return hashes


def processes_here() -> int:
    """Processes of this run that its launcher starts on this machine.

    Raises:
        UserError: what the launcher's variable says is no number of processes.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", str(count_here()))
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise UserError(
            f"environment variable LOCAL_WORLD_SIZE: got {text!r}; expected a whole number of at "
            "least 1. Correct or unset it."
        )
    return found
