"""What the programs compute and print, recorded before a change and compared after it.

`python -m tests.replay record FOLDER` before, `python -m tests.replay compare FOLDER` after: it
prints what differs, and exits with 1 if anything does. Both on one machine: bits depend on it.
"""
