"""Two runs with one seed."""

from tests.torture.application import MODES, Workshop
from tests.torture.judge import Broken, check_end
from tests.torture.torture import Torture


def trial(case: int, shop: Workshop) -> str:
    mode = list(MODES.values())[case]
    folder, undisturbed = shop.fresh(), shop.undisturbed(mode)
    try:
        shop.finish(mode, folder)
        check_end(folder / "runs/run", undisturbed)
    except Broken as error:
        raise Broken(f"a second run of mode {mode.name}: {error}") from error
    return f"a second run of mode {mode.name} is the first one, bit for bit"


SAME_SEED = Torture(
    "same_seed",
    "Two runs with one seed have the same metrics and checkpoints, bit for bit.",
    trial,
    lambda shop: len(MODES),
)
