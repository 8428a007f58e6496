"""nanoGPT's checkpoints: their logits, with biases and without, compiled or not; and refusals."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from popxl_gpt.config.presets import override
from popxl_gpt.demo.convert import main as convert
from popxl_gpt.execution.checkpoints.finding import find_trained
from popxl_gpt.execution.inference.inference import generation, logits
from popxl_gpt.execution.variables import write_whole_weights
from popxl_gpt.utils.errors import UserError

ARGS = {"n_layer": 2, "n_head": 3, "n_embd": 24, "block_size": 8, "vocab_size": 320, "dropout": 0.0}


class GPT(nn.Module):
    """The names, shapes and computation of nanoGPT's model."""

    def __init__(self, bias: bool):
        super().__init__()
        width = ARGS["n_embd"]

        def norm():
            made = nn.Module()
            made.weight = nn.Parameter(torch.ones(width))
            made.bias = nn.Parameter(torch.zeros(width)) if bias else None
            return made

        def block():
            linear = {
                "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width),
                "mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width),
            }  # fmt: skip
            made = nn.ModuleDict(
                {"ln_1": norm(), "attn": nn.Module(), "ln_2": norm(), "mlp": nn.Module()}
            )
            for name, sizes in linear.items():
                part, _, layer = name.partition(".")
                setattr(made[part], layer, nn.Linear(*sizes, bias=bias))
            return made

        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(ARGS["vocab_size"], width),
            "wpe": nn.Embedding(ARGS["block_size"], width),
            "h": nn.ModuleList(block() for _ in range(ARGS["n_layer"])),
            "ln_f": norm(),
        })  # fmt: skip
        self.lm_head = nn.Linear(width, ARGS["vocab_size"], bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, words):
        parts, width = self.transformer, ARGS["n_embd"]

        def norm(layer, x):
            return F.layer_norm(x, (width,), layer.weight, layer.bias, 1e-5)

        x = parts.wte(words) + parts.wpe(torch.arange(words.shape[1]))
        for block in parts.h:
            heads = block["attn"].c_attn(norm(block["ln_1"], x)).split(width, dim=2)
            q, k, v = (t.unflatten(2, (ARGS["n_head"], -1)).transpose(1, 2) for t in heads)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + block["attn"].c_proj(y)
            x = x + block["mlp"].c_proj(F.gelu(block["mlp"].c_fc(norm(block["ln_2"], x))))
        return self.lm_head(norm(parts.ln_f, x))


def saved(path: Path, bias: bool = True, prefix: str = "", **changes) -> GPT:
    torch.manual_seed(1)
    model = GPT(bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    content = {
        "model": {prefix + name: tensor for name, tensor in model.state_dict().items()},
        "optimizer": torch.optim.AdamW(model.parameters()).state_dict(),
        "model_args": {**ARGS, "bias": bias}, "iter_num": 3, "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "openwebtext", "compile": bool(prefix)},
    }  # fmt: skip
    torch.save({**content, **changes}, path)
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("bias, prefix", [(True, ""), (False, "_orig_mod.")])
def test_its_logits_are_nanogpts(tmp_path, bias, prefix):
    model = saved(tmp_path / "ckpt.pt", bias, prefix)
    convert(["from_nanogpt", str(tmp_path / "ckpt.pt"), str(tmp_path / "ours")])
    run = find_trained(tmp_path / "ours")
    assert run.config.model.biases == bias and run.config.model.activation == "gelu_exact"
    config = override(run.config, global_batch_size=2, micro_batch_size=2)
    words = np.random.default_rng(1).integers(0, 320, (2, 8)).astype(np.int32)
    session = generation(config, 16)
    write_whole_weights(session, config, run.weights())
    with session:
        ours = logits(session, config, words, np.arange(16, dtype=np.int32)[None])
    with torch.no_grad():
        theirs = model(torch.from_numpy(words).long()).numpy()
    np.testing.assert_allclose(ours.reshape(2, 8, 320), theirs, rtol=1e-5, atol=1e-5)


class Harm:
    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


REFUSED = {
    "no model": ({"model": None}, "got no model and model_args; expected both"),
    "an odd size": ({"model_args": {**ARGS, "n_expert": 2}}, "got an unknown n_expert in model_args"),
    "a size too few": ({"model_args": {"n_layer": 2}}, "got no block_size in model_args"),
    "no size": ({"model_args": {**ARGS, "n_layer": "two"}}, "model_args: layers: got 'two'"),
    "another size": ({"model_args": {**ARGS, "n_embd": 27}}, "got tensors of another model"),
}  # fmt: skip


@pytest.mark.parametrize("harm", REFUSED)
def test_what_is_none_of_its_files_is_refused(tmp_path, harm):
    changes, says = REFUSED[harm]
    saved(tmp_path / "ckpt.pt", **changes)
    with pytest.raises(UserError) as found:
        convert(["from_nanogpt", str(tmp_path / "ckpt.pt"), str(tmp_path / "ours")])
    assert says in str(found.value) and "ckpt.pt" in str(found.value)
    assert not (tmp_path / "ours").exists()


def test_nothing_in_a_file_runs(tmp_path):
    saved(tmp_path / "ckpt.pt", config=Harm(tmp_path / "harmed"))
    for words, name in ((b"", "nothing.pt"), (b"PK", "cut.pt")):
        (tmp_path / name).write_bytes(words)
    for name, says in (
        ("ckpt.pt", "got a pickle that asks for code of posix.mkdir; expected tensors"),
        ("nothing.pt", "got no file that torch.load reads"),
        ("cut.pt", "got no file that torch.load reads"),
        ("missing.pt", "No such file"),
    ):
        with pytest.raises(UserError, match=says):
            convert(["from_nanogpt", str(tmp_path / name), str(tmp_path / "ours")])
    assert not (tmp_path / "harmed").exists()
