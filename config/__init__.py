"""Configuration of a run: dataclasses, presets and the command line that derives from them.

Imports the standard library, yaml and `utils` only. A new setting is a field with a docstring in
the file of its section or feature, where its type says its limits and what it needs, and `RULES`
which others it must fit. A new preset is an entry of `pretraining.yml`. `--help` and the reference
follow.
"""
