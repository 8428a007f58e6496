"""Instances that die, that stop, and that are slow for a while."""

import itertools
import os
import random
import signal
import time
from dataclasses import replace

from tests.torture.application import MODES, Workshop, wait_for
from tests.torture.judge import Broken, check_checkpoints, check_end, check_no_traceback
from tests.torture.torture import Torture

TIMEOUT = 5
"""Seconds that instances wait for each other."""
POPRUN = replace(MODES["poprun"], launcher=("--timeout", str(TIMEOUT)))
FAULTS = ("death", "stop", "pause")
CASES = list(itertools.product(FAULTS, (0, 1), ("start", "training", "save", "validation")))


def trial(case: int, shop: Workshop) -> str:
    (fault, instance, moment), choice = CASES[case], random.Random(case)
    folder, undisturbed = shop.fresh(), shop.undisturbed(POPRUN)
    run, told = folder / "runs/run", f"{fault} of instance {instance} during {moment}"
    try:
        with shop.start(POPRUN, folder) as program:
            wait_for(moment, program, run, undisturbed, choice)
            while program.is_alive() and (number := member(program.members(), instance)) is None:
                time.sleep(0.01)
            if not program.is_alive():
                return f"{told}: too late"
            os.kill(number, signal.SIGKILL if fault == "death" else signal.SIGSTOP)
            if fault == "pause":
                time.sleep(TIMEOUT / 5)
                os.kill(number, signal.SIGCONT)
            begin = time.monotonic()
            code, output = program.wait(), program.output
        seconds = time.monotonic() - begin
        check_no_traceback(code, output)
        check_checkpoints(run, undisturbed)
        if (code == 0) != (fault == "pause"):
            raise Broken(f"ended with exit code {code}")
        if fault == "death" and f"instance {instance}" not in output:
            raise Broken(
                f"ended with exit code {code} and did not say that it was instance {instance}"
            )
        shop.finish(POPRUN, folder)
        check_end(run, undisturbed)
    except Broken as error:
        raise Broken(f"{told}: {error}") from error
    return f"{told}: exit code {code} after {seconds:.1f} s"


def member(members: "list[int]", instance: int) -> "int | None":
    """The process of an instance, which poprun has given its number."""
    for number in members[1:]:
        try:
            with open(f"/proc/{number}/environ", "rb") as file:
                if f"RANK={instance}".encode() in file.read().split(b"\0"):
                    return number
        except OSError:
            continue
    return None


INSTANCES = Torture(
    "instances",
    "An instance that dies or stops ends the run in words, and it goes on to the same bits.",
    trial,
    lambda shop: len(CASES),
)
