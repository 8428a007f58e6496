"""What a training program needs, does and reaches: a folder for each report.

`plan` shows a run that does not happen, `profile` one that did, `benchmark` the speed of several.
One file of each finds the numbers, the others show them: as text, as a picture, as plain values for
JSON. Programs call `report.py`.
"""
