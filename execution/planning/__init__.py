"""What a run needs before it starts: memory, traffic, time, and how it is best executed.

`memory.py` is the account of memory, `axes.py` the table of what may be chosen. `executing.py`
chooses the way to execute a model (`--auto`), `sizing.py` what is trained (`--minutes`).
"""
