"""The whole model as named tensors: which there are, how they start, how they are cut and joined.

Names are `embedding.word.weight`, `decoder.3.attention.qkv.weight`, `head.norm.bias`.
"""

from collections.abc import Mapping

import numpy as np

from popxl_gpt.config import Execution, Model
from popxl_gpt.modelling.decoder import DecoderBlock
from popxl_gpt.modelling.embedding import Embedding
from popxl_gpt.modelling.head import Head
from popxl_gpt.modelling.parameters import Table


def layer_tables(model: Model) -> "dict[str, Table]":
    """Parameters of each kind of layer; every decoder block has the same."""
    return {
        "embedding": Embedding.parameters(model),
        "decoder": DecoderBlock.parameters(model),
        "head": Head.parameters(model),
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


def shard_weights(
    whole: Mapping[str, np.ndarray], model: Model, execution: Execution
) -> "dict[str, np.ndarray]":
    """Host data of variables from whole tensors, for the layout that `execution` describes."""
    tp1, tp2 = execution.tensor_parallel_1, execution.tensor_parallel_2
    return {
        name: entry.shard(np.asarray(whole[name]), tp1, tp2)
        for name, entry in model_table(model).items()
    }


def unshard_weights(
    pieces: Mapping[str, np.ndarray], model: Model, execution: Execution
) -> "dict[str, np.ndarray]":
    """Whole tensors from the host data of variables: the inverse of `shard_weights`."""
    tp1, tp2 = execution.tensor_parallel_1, execution.tensor_parallel_2
    return {
        name: entry.unshard(np.asarray(pieces[name]), tp1, tp2)
        for name, entry in model_table(model).items()
    }
