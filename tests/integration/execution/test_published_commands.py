"""Commands that other programs' pages give, with our names by the table of names: they are read as
they stand, and train two steps at a small size.
"""

import math
import random

import pytest

from popxl_gpt.config.leaves import leaves
from popxl_gpt.config.other_programs import INSTEAD, SAME
from popxl_gpt.data.prepare import main as prepare
from popxl_gpt.demo.commands import parse_training
from popxl_gpt.execution.reports.metrics import read_metrics
from tests.integration.runs import run_job

NANOGPT = {
    "eval_interval": 2000, "log_interval": 1, "eval_iters": 200, "eval_only": False,
    "always_save_checkpoint": True, "init_from": "scratch", "wandb_log": False,
    "wandb_project": "owt", "wandb_run_name": "gpt2", "dataset": "openwebtext",
    "gradient_accumulation_steps": 40, "batch_size": 12, "block_size": 1024, "n_layer": 12,
    "n_head": 12, "n_embd": 768, "dropout": 0.0, "bias": False, "learning_rate": 6e-4,
    "max_iters": 600000, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0,
    "decay_lr": True, "warmup_iters": 2000, "lr_decay_iters": 600000, "min_lr": 6e-5,
    "backend": "nccl", "device": "cuda", "dtype": "bfloat16", "compile": True,
}  # fmt: skip
"""nanoGPT's train.py."""
PUBLISHED = {
    "nanoGPT, train_shakespeare_char": {
        **NANOGPT, "out_dir": "out-shakespeare-char", "eval_interval": 250, "log_interval": 10,
        "always_save_checkpoint": False, "wandb_project": "shakespeare-char",
        "wandb_run_name": "mini-gpt", "dataset": "shakespeare_char",
        "gradient_accumulation_steps": 1, "batch_size": 64, "block_size": 256, "n_layer": 6,
        "n_head": 6, "n_embd": 384, "dropout": 0.2, "learning_rate": 1e-3, "max_iters": 5000,
        "lr_decay_iters": 5000, "min_lr": 1e-4, "beta2": 0.99, "warmup_iters": 100,
    },
    "nanoGPT, train_gpt2": {
        **NANOGPT, "wandb_log": True, "wandb_run_name": "gpt2-124M", "eval_interval": 1000,
        "log_interval": 10,
    },
    "wordplay": {
        "backend": "DDP", "eval_interval": 100, "data": "shakespeare", "dtype": "bf16",
        "batch_size": 64, "block_size": 1024, "max_iters": 1000, "log_interval": 10,
        "compile": False, "gas": 1, "use_wandb": False,
    },
    "Graphcore, run_pretraining.py": {
        "layers": 32, "hidden_size": 2560, "sequence_length": 2048, "attention_heads": 32,
        "vocab_size": 50257, "max_positional_length": 2048, "dropout_prob": 0.1,
        "precision": "float16", "steps": 286000, "global_batch_size": 512, "maximum": 1.6e-4,
        "warmup_proportion": 0.00325, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1,
        "gradient_clipping": 1.0, "micro_batch_size": 8, "data_parallel": 4, "tensor_parallel": 8,
        "rts": True, "device_iterations": 1, "io_tiles": 64, "available_memory_proportion": 0.2,
        "loss_scaling": 512, "code_load": True, "extended_memory": True, "to_keep": 4,
    },
}  # fmt: skip
VALUES = {
    ("decay_lr", True): "cosine", ("dtype", "bf16"): "bfloat16", ("device", "cuda"): "auto",
    ("init_from", "scratch"): None,
}  # fmt: skip
"""What values are here, where they are others."""
SMALL = {
    "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 32, "batch_size": 2, "max_iters": 2,
    "eval_interval": 2, "eval_iters": 1, "warmup_iters": 1, "lr_decay_iters": 2,
    "gradient_accumulation_steps": 2, "layers": 2, "hidden_size": 16, "attention_heads": 8,
    "sequence_length": 32, "max_positional_length": 32, "steps": 2, "global_batch_size": 8,
    "micro_batch_size": 2, "data_parallel": 1, "vocab_size": 64, "wandb_log": False,
    "out_dir": None,
}  # fmt: skip
ONE = {"data_parallel": 1, "tensor_parallel_1": 1, "tensor_parallel_2": 1}
OWN = {leaf.name for leaf in leaves()}


def translated(settings):
    """Our flags, with values, of another program's settings."""
    found = {}
    for name, value in settings.items():
        value = VALUES.get((name, value), value)
        ours = SAME.get(name, name)
        if name == "lr_decay_iters":  # as the table says
            ours, value = "decay_steps", max(1, value - settings["warmup_iters"])
        elif name in INSTEAD or name in ("dataset", "data") or value is None:
            continue  # has no effect here, or is told by what a file is
        assert ours in OWN, f"{name} is in no table"
        found[ours] = str(value).lower() if isinstance(value, bool) else value
    return found


def words(flags):
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    letters = random.Random(3)
    (folder / "text.txt").write_text("".join(letters.choices("abcdefgh \n", k=4000)))
    flags = f"--tokenizer characters --sequence_length 32 --output {folder / 'made'}"
    more = "--validation 0.2 --workers 1"
    assert prepare(["text", str(folder / "text.txt"), *flags.split(), *more.split()]) == 0
    return str(folder / "made")


@pytest.mark.parametrize("program", PUBLISHED)
def test_what_is_published_is_read_as_it_stands(program, characters):
    settings = PUBLISHED[program]
    flags = {"config": "tiny", **ONE, **translated(settings), "input_files": characters}
    config = parse_training(words(flags)).config
    training, model = config.training, config.model
    assert training.steps == settings.get("max_iters", settings.get("steps"))
    batch = settings.get("gradient_accumulation_steps", 1) * settings.get("batch_size", 0)
    assert training.global_batch_size == (batch or settings["global_batch_size"])
    assert model.sequence_length == settings.get("block_size", settings.get("sequence_length"))
    if "lr_decay_iters" in settings:
        assert training.decay_steps == settings["lr_decay_iters"] - settings["warmup_iters"]
    if "warmup_proportion" in settings:
        assert training.warmup_steps == math.ceil(0.00325 * 286000)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("program", PUBLISHED)
def test_what_is_published_trains_at_a_small_size(program, characters, tmp_path):
    settings = PUBLISHED[program]
    small = {**settings, **{name: SMALL[name] for name in SMALL if name in settings}}
    shape = {"layers": 2, "hidden_size": 16, "heads": 2, "validate_every": 2}
    rest = {"validation_batches": 1, "samples": 0, "run_folder": tmp_path, "name": "run"}
    own = {**shape, **ONE, **translated(small), **rest, "input_files": characters}
    run_job(*words({"config": "tiny", **own}))
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss"]) for line in lines)
