"""A model larger than the memory that trains it: one of Llama 3.2's, 1.24 G parameters, rows in
files. It takes 35 GB of a disk: 2.5 the folder, 10 or 20 the rows, 15 the checkpoint.
"""

import json
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.torture.application import Mode, Program, Workshop
from tests.torture.judge import Broken
from tests.torture.plans import finished
from tests.torture.soak import look
from tests.torture.torture import Torture

SIZES = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "model_type": "llama", "torch_dtype": "bfloat16",
}  # fmt: skip
STEPS = 2
CASES = {
    "bfloat16": (6, {"precision": "bfloat16", "host_memory": "3200MiB"}),
    "float32": (8, {"precision": "float32", "host_memory": "5GiB"}),
}
"""GiB that steps may take, and settings."""


def make_folder(folder: Path) -> Path:
    """The model with weights at random, a file for each layer."""
    hidden, wide, few = SIZES["hidden_size"], SIZES["intermediate_size"], 512
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (few, hidden),
        "self_attn.v_proj": (few, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    words = {"model.embed_tokens": (SIZES["vocab_size"], hidden), "model.norm": (hidden,)}
    layers = [
        {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
        for n in range(SIZES["num_hidden_layers"])
    ]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SIZES))
    where, generator = {}, torch.Generator().manual_seed(0)
    for number, shapes in enumerate([words, *layers], 1):
        file = f"model-{number:05d}-of-{1 + len(layers):05d}.safetensors"
        tensors = {
            f"{name}.weight": torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, shape in shapes.items()
        }
        where |= dict.fromkeys(tensors, file)
        save_file(tensors, folder / file, {"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(index)
    return folder


def trial(case: int, shop: Workshop) -> str:
    name, (allowed, settings) = [*CASES.items()][case]
    folder = shop.fresh()
    mode = Mode(name, settings, has_rows=True)
    given = {
        "config": "mini", "init_from": make_folder(folder / "model"), "checkpoint__load": "none",
        "stochastic_rounding": "true", "moment_precision": "8bit", "sequence_length": 32,
        "global_batch_size": 1, "micro_batch_size": 1, "head_serialisation": 2, "steps": STEPS,
        "warmup_steps": 0, "schedule": "constant", "learning_rate": 1e-5,
        "minimum_learning_rate": 0, "validate_every": 0,
        "checkpoint__every": 0, "samples": 0, "dropout": 0, "log_every": 1,
        **dict.fromkeys(("input_files", "validation_files", "hidden_size", "heads", "vocabulary_size")),
    }  # fmt: skip
    begin = time.monotonic()
    with shop.start(mode, folder, is_cold=True, **given) as program:
        (steps, rest), seconds = watch(program), time.monotonic() - begin
        finished(program)
    told = f"{name}: {steps:.2f} GiB in {STEPS} steps, {rest:.2f} after them, {seconds:.0f} s"
    if steps > allowed:
        raise Broken(f"{told}; at most {allowed} GiB in steps are promised")
    return told


def watch(program: Program) -> "tuple[float, float]":
    """The most memory of the process until its last step is done, and from then on, in GiB."""
    most = {False: 0, True: 0}
    while program.is_alive():
        is_done = f"step {STEPS}/{STEPS} " in program.output
        with suppress(OSError):  # it has ended
            memory = look(program.process.pid, 0).memory
            most[is_done] = max(most[is_done], memory)
        time.sleep(0.1)
    return most[False] / 2**30, most[True] / 2**30


LARGE_MODELS = Torture(
    "large_models",
    "A model of Llama's with 1.24 G parameters is trained within 6 GiB, in float32 8.",
    trial,
    lambda shop: len(CASES) if shop.is_long else 0,
)
