"""All kinds of torture."""

from tests.torture.disks import DISKS
from tests.torture.flipped_bytes import FLIPPED_BYTES
from tests.torture.instances import INSTANCES
from tests.torture.kills import KILLS
from tests.torture.large_models import LARGE_MODELS
from tests.torture.layouts import ANY_LAYOUT
from tests.torture.of_tests import OF_TESTS
from tests.torture.plans import PLANS
from tests.torture.same_seed import SAME_SEED
from tests.torture.save_calls import SAVE_CALLS
from tests.torture.signals_in_states import SIGNALS_IN_STATES
from tests.torture.soak import SOAK

KINDS = [
    KILLS,
    SAVE_CALLS,
    FLIPPED_BYTES,
    DISKS,
    SIGNALS_IN_STATES,
    INSTANCES,
    SAME_SEED,
    ANY_LAYOUT,
    SOAK,
    PLANS,
    LARGE_MODELS,
    *OF_TESTS,
]
