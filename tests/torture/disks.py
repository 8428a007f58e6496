"""Disks that are full, read-only or slow, and folders that are deleted or renamed under a run."""

import errno
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.torture import calls
from tests.torture.application import MODES, MOMENTS, Program, Workshop, wait_for
from tests.torture.judge import Broken, check_checkpoints, check_end, check_words
from tests.torture.torture import Torture

SINGLE = MODES["single"]
CALLS = 150
"""Calls of a run, about: which one is the first to fail is drawn from them."""
KEPT = {"deleted": False, "deleted checkpoints": False, "renamed": True}
"""What happens to folders, and whether the run can go on afterwards."""


def trial(case: int, shop: Workshop) -> str:
    choice = random.Random(case)
    what = choice.choice(("full disk", "full", "read-only", "slow", *KEPT))
    try:
        if what in KEPT:
            return f"{what} {without_folder(what, choice, shop)}"
        return (
            f"{what} "
            f"{full_disk(choice, shop) if what == 'full disk' else failing_calls(what, choice, shop)}"
        )
    except Broken as error:
        raise Broken(f"{what}: {error}") from error


def failing_calls(what: str, choice: random.Random, shop: Workshop) -> str:
    """All calls below the run folder fail from one on, or are slow."""
    action = {"full": errno.ENOSPC, "read-only": errno.EROFS, "slow": "slow"}[what]
    folder, at = shop.fresh(), choice.randrange(1, CALLS)
    return ends_and_goes_on(
        f"from call {at} on",
        folder,
        shop,
        calls.settings(shop, folder / "runs", at=at, action=action, onward=True),
    )


def full_disk(choice: random.Random, shop: Workshop) -> str:
    """A file system in memory that is too small; where those are not permitted, calls that fail."""
    folder, size = shop.fresh(), choice.randrange(24, 600)
    (folder / "runs").mkdir()
    with mounted(folder / "runs", size) as is_mounted:
        if not is_mounted:
            return f"{failing_calls('full', choice, shop)}, as nothing can be mounted"
        return ends_and_goes_on(f"with {size} KiB", folder, shop, {}, larger=folder / "runs")


@contextmanager
def mounted(folder: Path, kibibytes: int) -> Iterator[bool]:
    """Mount a file system of a size; gives whether it could be."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "torture", folder],
        capture_output=True,
        check=False,
    )
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=True)


def ends_and_goes_on(
    told: str,
    folder: Path,
    shop: Workshop,
    environment: "dict[str, str]",
    larger: "Path | None" = None,
) -> str:
    """Run on a bad disk, judge, mend the disk, go on, judge."""
    run, undisturbed = folder / "runs/run", shop.undisturbed(SINGLE)
    with shop.start(SINGLE, folder, environment) as program:
        code, output = program.wait(), program.output
    check_words(code, output)
    check_checkpoints(run, undisturbed)
    if code == 0:
        check_end(run, undisturbed, is_tidy=False)
    if larger is not None:
        subprocess.run(["mount", "-o", "remount,size=64m", larger], check=True)
    shop.finish(SINGLE, folder)
    check_end(run, undisturbed, is_tidy=False)
    return f"{told}: exit code {code}"


def without_folder(what: str, choice: random.Random, shop: Workshop) -> str:
    """The run's folder goes away while it runs: it says so, or its end is nevertheless there."""
    folder, moment, undisturbed = (
        shop.fresh(),
        choice.choice(MOMENTS[1:-1]),
        shop.undisturbed(SINGLE),
    )
    run = folder / "runs/run"
    with shop.start(SINGLE, folder) as program:
        wait_for(moment, program, run, undisturbed, choice)
        take_away(what, run, program)
        code, output = program.wait(), program.output
    check_words(code, output)
    if code == 0:
        try:
            check_end(run, undisturbed, is_tidy=False)
        except (Broken, OSError) as error:
            raise Broken(f"during {moment}: ended with exit code 0, and {error}") from error
    if KEPT[what]:
        shutil.rmtree(run, ignore_errors=True)
        (folder / "runs/away").rename(run)
        check_checkpoints(run, undisturbed)
        shop.finish(SINGLE, folder)
        check_end(run, undisturbed, is_tidy=False)
    return f"during {moment}: exit code {code}"


def take_away(what: str, run: Path, program: Program) -> None:
    if not program.is_alive():
        raise Broken("ended before its time")
    if what == "renamed":
        run.rename(run.with_name("away"))
    else:
        shutil.rmtree(
            run / "checkpoints" if what == "deleted checkpoints" else run, ignore_errors=True
        )


DISKS = Torture(
    "disks", "A bad disk or a lost folder ends a run in words, or costs nothing.", trial
)
