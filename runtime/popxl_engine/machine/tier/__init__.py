"""Remote rows that come and go: fetched ahead of their use and written behind it, through memory of
a fixed size.

The memory is the host's and the store a file, or the memory is a device's and the store the host's.
"""

from popxl_engine.machine.tier.cache import ALL_RULES, Cache
from popxl_engine.machine.tier.course import Course
from popxl_engine.machine.tier.host import HostStore, StagedStore
from popxl_engine.machine.tier.rows import MovingRows, Tier, make_moving_rows, shared_bytes
from popxl_engine.machine.tier.sharing import Share, budget_of
from popxl_engine.machine.tier.store import BLOCK, FileStore, Store

__all__ = [
    *(
        "ALL_RULES",
        "BLOCK",
        "Cache",
        "Course",
        "FileStore",
        "HostStore",
        "MovingRows",
        "Share",
        "Share",
        "StagedStore",
        "Store",
        "Tier",
    ),
    *("budget_of", "make_moving_rows", "shared_bytes"),
]
