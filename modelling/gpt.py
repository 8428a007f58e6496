"""The whole model as named tensors: which there are, how they start, how they are cut and joined.

Names are `embedding.word.weight`, `decoder.3.attention.qkv.weight`, `head.norm.bias`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from popxl_gpt.config.schema import Execution, Model
from popxl_gpt.modelling.decoder import DecoderBlock
from popxl_gpt.modelling.embedding import Embedding
from popxl_gpt.modelling.head import Head
from popxl_gpt.modelling.parameters import Role, Table, cut, in_parts, joined


def layer_tables(model: Model) -> "dict[str, Table]":
    """Parameters of each kind of layer; every decoder block has the same."""
    tables = {
        "embedding": Embedding.parameters(model),
        "decoder": DecoderBlock.parameters(model),
        "head": Head.parameters(model),
    }
    if model.initialisation == "width":
        return {name: started_by_width(table, model) for name, table in tables.items()}
    return tables


def started_by_width(table: Table, model: Model) -> Table:
    """The same, with 1/sqrt(inputs) in place of `initial_std` for matrices [inputs, outputs] of
    hidden layers: what goes into them and what comes out have the same size, at any width.

    Source: Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, table 8.
    """
    return {
        name: replace(p, std=p.std / model.initial_std / math.sqrt(p.shape[0]))
        if p.role is Role.WEIGHT
        else p
        for name, p in table.items()
    }


def model_table(model: Model) -> Table:
    """Parameters of the whole model; those of block n begin with `decoder.n`."""
    tables = layer_tables(model)
    blocks = [("embedding", tables["embedding"])]
    blocks += [(f"decoder.{n}", tables["decoder"]) for n in range(model.layers)]
    blocks += [("head", tables["head"])]
    return {
        f"{prefix}.{name}": parameter
        for prefix, table in blocks
        for name, parameter in table.items()
    }


def program_table(model: Model, execution: Execution) -> Table:
    """Parameters of the whole model as a program has them, in their parts."""
    return in_parts(
        model_table(model), execution.embedding_serialisation, execution.tensor_parallel_1
    )


def in_program(
    name: str, whole: np.ndarray, model: Model, execution: Execution
) -> "dict[str, np.ndarray]":
    """A whole tensor as a program has it, in its parts, by their names."""
    count, tp1 = execution.embedding_serialisation, execution.tensor_parallel_1
    parameter = model_table(model)[name]
    names = in_parts({name: parameter}, count, tp1)
    return dict(zip(names, cut(parameter, whole, count, tp1)))


def of_program(
    parts: Mapping[str, np.ndarray], model: Model, execution: Execution
) -> "dict[str, np.ndarray]":
    """The inverse for several tensors."""
    count, tp1 = execution.embedding_serialisation, execution.tensor_parallel_1
    found = {}
    for name, parameter in model_table(model).items():
        own = [parts[part] for part in in_parts({name: parameter}, count, tp1) if part in parts]
        if own:
            found[name] = joined(parameter, own, tp1)
    return found
