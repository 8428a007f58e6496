"""Signals in all states of a run, once and again, to one process, to a launcher, and to a launcher
and its instances at once.
"""

import itertools
import os
import random
import signal
import time
from contextlib import suppress

from tests.torture.application import (
    MODES,
    MOMENTS,
    STEPS,
    Workshop,
    last_line,
    steps_in,
    wait_for,
)
from tests.torture.judge import Broken, check_checkpoints, check_end, check_no_traceback
from tests.torture.torture import Torture

SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1)
TO = {"process": "single", "launcher": "poprun", "all at once": "poprun"}
AGAIN = (signal.SIGTERM, signal.SIGINT)
"""Those that end a run at once where another came before."""
STATES = (*MOMENTS, "first step")
CASES = [
    *itertools.product(SIGNALS, MOMENTS, TO, [False]),
    *itertools.product(SIGNALS, ["first step"], TO, [False]),
    *itertools.product(AGAIN, STATES, TO, [True]),
]
"""Signal, state, who gets it, and whether they get it again."""
SETTINGS = {"checkpoint__keep": 1000}


def trial(case: int, shop: Workshop) -> str:
    (number, moment, to, is_again), choice = CASES[case], random.Random(case)
    mode, folder = MODES[TO[to]], shop.fresh()
    run, undisturbed = folder / "runs/run", shop.undisturbed(mode)
    told = f"{number.name}{' twice' if is_again else ''} during {moment} to {to}"
    try:
        asks_for_one = number == signal.SIGUSR1 and moment == "training"
        settings = SETTINGS | ({"checkpoint__every": 0} if asks_for_one else {})
        with shop.start(mode, folder, **settings) as program:
            wait_for(moment, program, run, undisturbed, choice)
            members = program.members()
            if asks_for_one:  # so that it is heard after the step that is the last one now
                send(signal.SIGSTOP, members)
            was_alive, done = program.is_alive(), steps_in(run)
            send(number, members if to == "all at once" else members[:1])
            if asks_for_one:
                send(signal.SIGCONT, members)
            if is_again:
                time.sleep(1.1)
                send(number, members if to == "all at once" else members[:1])
            code, output = program.wait(), program.output
        saved = check_checkpoints(run, undisturbed)
        check_no_traceback(code, output)
        if was_alive:
            judge(number, "end" if done >= STEPS else moment, code, output)
        if asks_for_one and done < STEPS - 2:
            steps = [int(checkpoint.name[5:]) for checkpoint in saved]
            if not any(done <= step < STEPS for step in steps):
                raise Broken(f"nothing was saved between step {done} and the last")
        if (
            code == 128 + number
            and not is_again
            and steps_in(run)
            and (not saved or int(saved[-1].name[5:]) != steps_in(run))
        ):
            raise Broken(f"{steps_in(run)} steps were done, and the last is not saved")
        shop.finish(mode, folder, **SETTINGS)
        check_end(run, undisturbed)
    except Broken as error:
        raise Broken(f"{told}: {error}") from error
    return f"{told}: exit code {code} after step {steps_in(run)}"


def judge(number: signal.Signals, moment: str, code: int, output: str) -> None:
    """Whether a run ended, or went on, as the signal asks for."""
    right = {0} if number == signal.SIGUSR1 else {128 + number}
    if moment in ("start", "end"):  # before signals are heard, and when all is saved
        right |= {-number}
    if moment == "end":
        right |= {0}
    if code not in right:
        raise Broken(f"exit code {code}; expected {max(right)}: {last_line(output)}")


def send(number: signal.Signals, members: "list[int]") -> None:
    """Send a signal to these processes of a run."""
    for member in members:
        with suppress(ProcessLookupError):
            os.kill(member, number)


SIGNALS_IN_STATES = Torture(
    "signals",
    "A signal saves all steps and ends a run with 128 + n; SIGUSR1 saves, and the run goes on.",
    trial,
    lambda shop: len(CASES),
)
