"""`popxl.ops.repeat`: the import path that programs use."""

from popxl.ops.call import CallSiteInfo, repeat, repeat_with_info

__all__ = ["CallSiteInfo", "repeat", "repeat_with_info"]
