"""SIGKILL before every call of a save that changes files, in the middle of every write, and an
error from each.
"""

import errno

from tests.torture import calls
from tests.torture.application import MODES, Workshop, last_line
from tests.torture.judge import Broken, check_checkpoints, check_end, check_words
from tests.torture.torture import Torture

SINGLE = MODES["single"]
BEFORE = 9
"""The step that the run goes on from; it saves after the last one, and then deletes this one's."""
SETTINGS = {"checkpoint__every": 0, "checkpoint__keep": 1}
NEEDS_SPACE = ("open", "write", "mkdir", "truncate", "fallocate", "fsync")


def plan(shop: Workshop) -> "list[tuple[int, calls.Call, str]]":
    """What can happen in a save: number and call, and an action."""
    folder = shop.stopped_after(BEFORE, SINGLE)
    environment = calls.settings(shop, folder / "runs/run/checkpoints", log=str(folder / "calls"))
    with shop.start(SINGLE, folder, environment, **SETTINGS) as program:
        code = program.wait()
        if code != 0:
            raise Broken(
                f"a save with counted calls ended with exit code {code}: "
                f"{last_line(program.output)}"
            )
    found = []
    for number, call in enumerate(calls.read_log(folder / "calls"), start=1):
        actions = (
            ["kill", "EIO"]
            + ["tear"] * (call.name == "write")
            + ["ENOSPC"] * (call.name in NEEDS_SPACE)
        )
        found += [(number, call, action) for action in actions]
    return found


def planned(shop: Workshop) -> "list[tuple[int, calls.Call, str]]":
    return shop.shared("calls of a save", lambda: plan(shop))


def trial(case: int, shop: Workshop) -> str:
    (number, call, action), undisturbed = planned(shop)[case], shop.undisturbed(SINGLE)
    told = f"{action} at call {number}, {call.name} {call.path.rpartition('/')[2]}"
    folder, error = shop.stopped_after(BEFORE, SINGLE), getattr(errno, action, None)
    run = folder / "runs/run"
    environment = calls.settings(shop, run / "checkpoints", at=number, action=error or action)
    with shop.start(SINGLE, folder, environment, **SETTINGS) as program:
        code, output = program.wait(), program.output
    try:
        judge(code, output, error)
        if not check_checkpoints(run, undisturbed):
            raise Broken("no checkpoint is left")
        if error is not None and code == 0:
            check_end(run, undisturbed, is_tidy=False)
        shop.finish(SINGLE, folder, **SETTINGS)
        check_end(run, undisturbed, is_tidy=error is None)
    except Broken as broken:
        raise Broken(f"{told}: {broken}") from broken
    return f"{told}: exit code {code}"


def judge(code: int, output: str, error: "int | None") -> None:
    """A process that was killed has not ended otherwise; one that met an error ended in words, or
    went on.
    """
    if error is not None:
        check_words(code, output)
    elif code not in (0, -9):
        raise Broken(f"ended with exit code {code}: {last_line(output)}")


SAVE_CALLS = Torture(
    "save_calls",
    "A save that is killed, or fails, at any call leaves whole checkpoints.",
    trial,
    lambda shop: len(planned(shop)),
)
