"""Remote rows that come and go: fetched ahead of their use and written behind it, through memory of
a fixed size.

The memory is the host's and the store a file, or the memory is a device's and the store the host's.
"""

from popxl_engine.machine.paging.access_trace import AccessTrace
from popxl_engine.machine.paging.budget import Tenant, budget_of
from popxl_engine.machine.paging.cache import Cache
from popxl_engine.machine.paging.hazards import RULES
from popxl_engine.machine.paging.host import HostStore, StagedStore
from popxl_engine.machine.paging.paged_buffer import (
    PagedBuffer,
    Paging,
    make_paged_buffer,
    shared_bytes,
)
from popxl_engine.machine.paging.store import BLOCK, FileStore, Store

__all__ = [
    *(
        "RULES",
        "BLOCK",
        "Cache",
        "AccessTrace",
        "FileStore",
        "HostStore",
        "PagedBuffer",
        "Tenant",
        "StagedStore",
        "Store",
        "Paging",
    ),
    *("budget_of", "make_paged_buffer", "shared_bytes"),
]
