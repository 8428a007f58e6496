"""Phased execution: the graphs of each layer, the phases of a step, and the session that runs them.

May import everything of the application but `demo`, and never the engine. A new phase is a
top-level function in `phases.py`, one line in `optimizer_step` of `pretraining.py`, and a case in
`tests/integration/execution/test_phases.py`. What users see of a program stands in `reports/`.
"""
