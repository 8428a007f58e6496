"""Configuration of a run: dataclasses, presets and the command line that derives from them.

Imports the standard library and yaml only. A new setting is a field with a docstring in
`schema.py`, and a rule in `validation.py` if it must fit others, or a line of `partners.py` if it
does nothing without another one. A new preset is an entry of `pretraining.yml`. `--help` and the
reference follow.
"""
