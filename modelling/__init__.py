"""The GPT's layers: one class per layer, for every way to split it over replicas.

May import `config`, `utils`, `popxl_addons` and `popxl`. A new layer is a file with a `Layer`, its
table of parameters beside it, and a case in `tests/integration/layers/cases.py`.
"""

from popxl_gpt.modelling.gpt import layer_tables, model_table, shard_weights, unshard_weights
from popxl_gpt.modelling.layer import Layer
from popxl_gpt.modelling.layout import Layout
from popxl_gpt.modelling.parameters import Parameter, Role, Table, trained

__all__ = [
    "Layer", "Layout", "Parameter", "Role", "Table", "layer_tables", "model_table", "shard_weights",
    "trained", "unshard_weights",
]  # fmt: skip
