"""The GPT's layers: one class per layer, for every way to split it over replicas.

May import `config`, `utils`, `popxl_addons` and `popxl`. A new layer is a file with a `Layer`, its
table of parameters beside it, and a case in `tests/integration/layers/cases.py`.
"""
