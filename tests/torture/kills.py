"""SIGKILL at random moments, in every mode."""

import random
import signal

from tests.torture.application import (
    MODES,
    MOMENTS,
    Mode,
    Program,
    Workshop,
    last_line,
    steps_in,
    wait_for,
)
from tests.torture.judge import Broken, check_checkpoints, check_end
from tests.torture.torture import Torture


def trial(case: int, shop: Workshop) -> str:
    choice = random.Random(case)
    mode, folder = MODES[choice.choice(list(MODES))], shop.fresh()
    run, undisturbed, told = folder / "runs/run", shop.undisturbed(mode), []
    for _ in range(choice.randint(1, 3)):
        moment, begun = choice.choice(MOMENTS), steps_in(run)
        with shop.start(mode, folder) as program:
            wait_for(moment, program, run, undisturbed, choice)
            who = kill(program, mode, choice)
            code, output = program.wait(), program.output
        if code not in (0, -signal.SIGKILL) and mode.instances == 1:
            raise Broken(
                f"could not go on after {', '.join(told)}: exit code {code}: {last_line(output)}"
            )
        told.append(
            f"{who} during {'resume' if moment == 'start' and begun else moment} after step "
            f"{steps_in(run)}"
        )
        check_checkpoints(run, undisturbed)
    shop.finish(mode, folder)
    check_end(run, undisturbed)
    return f"{mode.name}: {', '.join(told)}"


def kill(program: Program, mode: Mode, choice: random.Random) -> str:
    """Kill a run's first process, one of the others, or all of them. Returns which."""
    members = program.members()
    if mode.instances == 1 or len(members) < 2:
        program.kill(*members)
        return "killed"
    which = choice.choice(("launcher", "one", "all"))
    program.kill(*{"launcher": members[:1], "one": [choice.choice(members)], "all": members}[which])
    return f"killed {which}"


KILLS = Torture("kills", "A run that is killed at any moment goes on to the same bits.", trial)
