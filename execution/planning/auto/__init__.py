"""`--auto`: how to execute a given model here, by plans and by short trials.

May import `config`, `utils`, and of `execution` what builds, plans and runs the training program.
The door is `choose` in `choice.py`. A further setting that is chosen is named in `candidates.py`.
"""
