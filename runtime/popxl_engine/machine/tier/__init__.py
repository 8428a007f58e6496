"""Remote rows in files: fetched ahead of their use and written behind it, through memory of a fixed size."""

from popxl_engine.machine.tier.cache import ALL_RULES, Cache
from popxl_engine.machine.tier.course import Course
from popxl_engine.machine.tier.rows import FileRows, Tier, make_file_rows
from popxl_engine.machine.tier.store import BLOCK, FileStore, Store

__all__ = ["ALL_RULES", "BLOCK", "Cache", "Course", "FileRows", "FileStore", "Store", "Tier", "make_file_rows"]
