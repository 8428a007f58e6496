"""What the programs in examples/ compute is what PyTorch computes: the same weights, data and
steps, by other hands.

Models that Hugging Face has are compared with Hugging Face's, the others with a few lines of torch.
"""

import runpy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import popxl
import popxl_addons
import pytest
import torch
from helpers.quick import Later
from popxl_addons import TaskSession

transformers = Later("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 6


def example(name: str) -> SimpleNamespace:
    """What a program defines; its main does not run."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLES / f"{name}.py")))


def random_weights(model: torch.nn.Module, scale: float = 0.2) -> dict[str, np.ndarray]:
    """Every parameter random, gains around one: those of a fresh model would hide that they are not
    used.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = scale * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + (parameter.detach() == 1))
    return by_name(model)


def by_name(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def write(session: TaskSession, values: Mapping[str, np.ndarray]) -> None:
    """Give the forward weights of a session their values: every one, and no other."""
    variables = session.state.fwd.to_dict()
    assert sorted(values) == sorted(variables)
    session.write_variables_data(
        {v: np.ascontiguousarray(values[n], v.dtype.as_numpy()) for n, v in variables.items()}
    )


def adamw(
    model: torch.nn.Module, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW that decays matrices only, with the epsilon of PopXL's."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, eps=1e-5)


def clipping(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, largest: float
) -> torch.optim.Optimizer:
    """The optimizer; before its steps the gradients' common norm is limited. `optimizer.clipped`:
    where it was.
    """
    optimizer.clipped = []

    def before_step(*_: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.clipped.append(bool(norm > largest))

    optimizer.register_step_pre_hook(before_step)
    return optimizer


def torch_losses(
    optimizer: torch.optim.Optimizer, losses: "Iterable[Callable[[], torch.Tensor]]"
) -> list[float]:
    """Train: the loss before each step."""
    found = []
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def long(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(np.asarray(array)).long()


def moments(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, name: str
) -> dict[str, np.ndarray]:
    """Adam's means of gradients or of their squares, which weights do not tell: Adam divides one by
    the other.
    """
    return {n: optimizer.state[p][name].numpy() for n, p in model.named_parameters()}


def assert_same_state(
    session: TaskSession, ours: Callable, model: torch.nn.Module, optimizer: torch.optim.Optimizer
):
    """The state after some steps is the same: weights and both moments, tensor by tensor. `ours`
    gives them the names of the example.

    Gradients that are zero in theory (of what is added to all scores of a softmax) are rounding
    errors, which are compared with zero; a weight that Adam moved by them is not compared.
    """
    state = session.get_named_tensors_data()
    got = {"": state.fwd.to_dict(), "exp_avg": {}, "exp_avg_sq": {}}
    for name, value in state.optim.to_dict().items():
        weight, _, kind = name.rpartition(".")
        if kind != "step":
            got[{"first_order": "exp_avg", "second_order": "exp_avg_sq"}[kind]][weight] = value
    sizes = {
        n: np.sqrt(square.sum())
        for n, square in ours(moments(optimizer, model, "exp_avg_sq")).items()
    }
    moved_by_noise = {name for name, size in sizes.items() if size < 1e-5 * max(sizes.values())}
    assert len(moved_by_noise) <= 2
    for kind, values in got.items():
        expected = ours(moments(optimizer, model, kind) if kind else by_name(model))
        assert sorted(values) == sorted(expected)
        least = 1e-3 * max(np.linalg.norm(value) for value in expected.values())
        for name in sorted(set(values) - (moved_by_noise if kind == "" else set())):
            error = np.linalg.norm(values[name] - expected[name]) / max(
                np.linalg.norm(expected[name]), least
            )
            assert error < 1e-4, f"{kind} of {name}: relative error {error:.1e}"


# BERT


def hugging_face_bert(config: Any, of: str, layers: int) -> torch.nn.Module:
    settings = transformers.BertConfig(
        vocab_size=config.vocabulary_size, hidden_size=config.hidden_size, num_hidden_layers=layers,
        num_attention_heads=config.heads, intermediate_size=4 * config.hidden_size,
        max_position_embeddings=config.sequence_length, type_vocab_size=2, layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager", pad_token_id=None,
    )  # fmt: skip
    return getattr(transformers, of)(settings)


def bert_weights(p: Mapping[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """The weights of the example by Hugging Face's."""

    def linear(ours: str, *theirs: str) -> dict[str, np.ndarray]:
        return {
            f"{ours}.weight": np.concatenate([p[f"{name}.weight"] for name in theirs]).T,
            f"{ours}.bias": np.concatenate([p[f"{name}.bias"] for name in theirs]),
        }

    def norm(ours: str, theirs: str) -> dict[str, np.ndarray]:
        return {f"{ours}.{name}": p[f"{theirs}.{name}"] for name in ("weight", "bias")}

    found = norm("bert.norm", "bert.embeddings.LayerNorm")
    for ours, theirs in {"words": "word", "places": "position", "parts": "token_type"}.items():
        found[f"bert.{ours}.weight"] = p[f"bert.embeddings.{theirs}_embeddings.weight"]
    for i in range(layers):
        ours, theirs = f"bert.{i}", f"bert.encoder.layer.{i}"
        heads = [f"{theirs}.attention.self.{name}" for name in ("query", "key", "value")]
        found |= linear(f"{ours}.attention.qkv", *heads)
        found |= linear(f"{ours}.attention.output", f"{theirs}.attention.output.dense")
        found |= norm(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        found |= linear(f"{ours}.up", f"{theirs}.intermediate.dense")
        found |= linear(f"{ours}.down", f"{theirs}.output.dense")
        found |= norm(f"{ours}.feed_forward_norm", f"{theirs}.output.LayerNorm")
    if "qa_outputs.weight" in p:
        return found | linear("ends", "qa_outputs")
    found |= linear("dense", "cls.predictions.transform.dense")
    found |= norm("norm", "cls.predictions.transform.LayerNorm")
    return found | {"bias": p["cls.predictions.bias"]}


def bert_runs(head: str, **options: Any) -> "tuple[Any, Any, Any, list[dict[str, np.ndarray]]]":
    """(program, config, Hugging Face's model, batches) for a head of the example."""
    program = example("bert_encoder")
    config = program.BertConfig(micro_batch_size=8, hidden_size=24, **options)
    of = {"MaskedWords": "BertForMaskedLM", "Spans": "BertForQuestionAnswering"}[head]
    rng = np.random.default_rng(1)
    batches = [program.masked(rng, program.texts(rng, config)) for _ in range(STEPS)]
    return program, config, hugging_face_bert(config, of, config.layers), batches


def bert_loss(
    model: torch.nn.Module, batch: Mapping[str, np.ndarray]
) -> Callable[[], torch.Tensor]:
    ids = long(batch["ids"])
    given = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "token_type_ids": long(batch["parts"]),
    }
    if hasattr(model, "qa_outputs"):
        answer = {"start_positions": long(batch["first"]), "end_positions": long(batch["last"])}
    else:
        labels = long(batch["labels"])
        answer = {"labels": torch.where(labels == 0, -100, labels)}
    return lambda: model(**given, **answer).loss


@pytest.mark.slow
@pytest.mark.parametrize("head", ["MaskedWords", "Spans"])
def test_berts_losses_weights_and_moments_are_those_of_hugging_faces_while_it_trains(head):
    program, config, model, batches = bert_runs(head)
    weights = bert_weights(random_weights(model), config.layers)
    with program.training_session(getattr(program, head)(config), config) as session:
        write(session, weights)
        losses = [program.train(session, batch)[0] for batch in batches]
        optimizer = adamw(model, config.learning_rate, config.weight_decay)
        expected = torch_losses(optimizer, (bert_loss(model, b) for b in batches))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert_same_state(
            session, lambda values: bert_weights(values, config.layers), model, optimizer
        )


@pytest.mark.slow
def test_bert_in_float16_follows_hugging_faces_in_float32():
    program, config, model, batches = bert_runs(
        "MaskedWords", dtype=popxl.float16, loss_scaling=64.0
    )
    weights = bert_weights(random_weights(model, 0.1), config.layers)
    with program.training_session(program.MaskedWords(config), config) as session:
        write(session, weights)
        losses = [program.train(session, batch)[0] for batch in batches]
    expected = torch_losses(
        adamw(model, config.learning_rate, config.weight_decay),
        (bert_loss(model, b) for b in batches),
    )
    np.testing.assert_allclose(losses, expected, rtol=5e-3)


@pytest.mark.slow
def test_bert_finds_answers_with_the_encoder_that_was_pretrained(capsys):
    """The encoder's weights pass to the fine-tuning session, the head's do not."""
    program = example("bert_encoder")
    config = program.BertConfig(micro_batch_size=2, hidden_size=8, layers=1)
    with program.training_session(program.MaskedWords(config), config) as pretraining:
        with program.training_session(program.Spans(config), config) as fine_tuning:
            fine_tuning.load_from_session(pretraining)
            shared = fine_tuning.get_named_tensors_data().fwd.bert.to_dict()
            for name, value in pretraining.get_named_tensors_data().fwd.bert.to_dict().items():
                np.testing.assert_array_equal(shared[name], value)


# LLaMA


def hugging_face_llama(config: Any) -> torch.nn.Module:
    settings = transformers.LlamaConfig(
        vocab_size=config.vocabulary_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.key_value_heads,
        max_position_embeddings=config.sequence_length, rms_norm_eps=1e-6, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(settings)


def interleaved(weight: np.ndarray, features: int) -> np.ndarray:
    """Rows of a query or key projection in another order: Hugging Face pairs feature i with i +
    features / 2.
    """
    return (
        weight.reshape(-1, 2, features // 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
    )


def llama_weights(p: Mapping[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """The weights of the example by Hugging Face's."""
    features = config.hidden_size // config.heads
    found = {
        "words.weight": p["model.embed_tokens.weight"],
        "norm.weight": p["model.norm.weight"],
        "head.weight": p["lm_head.weight"].T,
    }
    for i in range(config.layers):
        theirs = f"model.layers.{i}"
        found[f"{i}.attention_norm.weight"] = p[f"{theirs}.input_layernorm.weight"]
        found[f"{i}.feed_forward_norm.weight"] = p[f"{theirs}.post_attention_layernorm.weight"]
        for name, letter in {"query": "q", "key": "k", "value": "v", "output": "o"}.items():
            weight = p[f"{theirs}.self_attn.{letter}_proj.weight"]
            weight = interleaved(weight, features) if letter in "qk" else weight
            found[f"{i}.attention.{name}.weight"] = weight.T
        for name in ("gate", "up", "down"):
            found[f"{i}.{name}.weight"] = p[f"{theirs}.mlp.{name}_proj.weight"].T
    return found


def llama_loss(
    model: torch.nn.Module, batch: Mapping[str, np.ndarray]
) -> Callable[[], torch.Tensor]:
    """The loss of all micro-batches at once."""
    words, following = long(batch["words"]).flatten(0, 1), long(batch["following"]).flatten()
    return lambda: torch.nn.functional.cross_entropy(model(words).logits.flatten(0, 1), following)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"key_value_heads": 4}, {"key_value_heads": 1, "micro_batches": 2}],
    ids=lambda o: str(o),
)
def test_llamas_losses_weights_and_moments_are_those_of_hugging_faces_while_it_trains(options):
    program = example("llama")
    config = program.LlamaConfig(micro_batch_size=2, sequence_length=9, max_norm=0.5, **options)
    model = hugging_face_llama(config)
    weights = llama_weights(random_weights(model), config)
    rng = np.random.default_rng(1)
    batches = [program.batch(rng, config) for _ in range(STEPS)]
    with program.training_session(config) as session:
        write(session, weights)
        losses = [program.train(session, batch) for batch in batches]
        optimizer = clipping(
            adamw(model, config.learning_rate, config.weight_decay), model, config.max_norm
        )
        expected = torch_losses(optimizer, (llama_loss(model, batch) for batch in batches))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert_same_state(session, lambda values: llama_weights(values, config), model, optimizer)


@pytest.mark.slow
def test_llama_in_float16_follows_hugging_faces_in_float32():
    program = example("llama")
    config = program.LlamaConfig(micro_batch_size=2, sequence_length=9, dtype=popxl.float16)
    model = hugging_face_llama(config)
    weights = llama_weights(random_weights(model), config)
    rng = np.random.default_rng(1)
    batches = [program.batch(rng, config) for _ in range(STEPS)]
    with program.training_session(config) as session:
        write(session, weights)
        losses = [program.train(session, batch) for batch in batches]
    optimizer = clipping(
        adamw(model, config.learning_rate, config.weight_decay), model, config.max_norm
    )
    expected = torch_losses(optimizer, (llama_loss(model, batch) for batch in batches))
    np.testing.assert_allclose(losses, expected, rtol=1e-2)


@pytest.mark.slow
def test_llama_goes_on_with_the_words_that_hugging_faces_says():
    program = example("llama")
    config = program.LlamaConfig(sequence_length=12)
    model = hugging_face_llama(config)
    weights = llama_weights(random_weights(model), config)
    prompt = np.random.default_rng(0).integers(0, config.vocabulary_size, (1, 4))
    wanted = model.generate(
        long(prompt),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        attention_mask=torch.ones(1, 4).long(),
    )
    with program.answering_session(config, prompt=4) as session:
        write(session, weights)
        words = np.pad(prompt, ((0, 0), (0, 8))).astype(np.int32)
        said = session.run({session.inputs.words: words})[session.outputs.words]
    np.testing.assert_array_equal(said, wanted.numpy())


# T5


def hugging_face_t5(config: Any) -> torch.nn.Module:
    settings = transformers.T5Config(
        vocab_size=config.vocabulary_size, d_model=config.hidden_size, d_kv=config.head_size,
        d_ff=config.intermediate_size, num_layers=config.layers, num_heads=config.heads, dropout_rate=0.0,
        relative_attention_num_buckets=config.buckets, relative_attention_max_distance=config.max_distance,
        feed_forward_proj="relu", pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(settings)


def t5_weights(p: Mapping[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """The weights of the example by Hugging Face's."""
    attention = {"query": "q", "key": "k", "value": "v", "output": "o"}
    found = {"words": p["shared.weight"]}
    for stack in ("encoder", "decoder"):
        distance = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found[f"{stack}.distance.table.weight"] = p[distance]
        found[f"{stack}.norm.weight"] = p[f"{stack}.final_layer_norm.weight"]
        parts = [
            ("norm", "attention", "SelfAttention"),
            ("cross_norm", "cross_attention", "EncDecAttention"),
        ]
        parts = parts[: 1 + (stack == "decoder")]
        for i in range(config.layers):
            ours, theirs = f"{stack}.layers.{i}", f"{stack}.block.{i}.layer"
            for j, (norm, module, name) in enumerate(parts):
                found[f"{ours}.{norm}.weight"] = p[f"{theirs}.{j}.layer_norm.weight"]
                for part, letter in attention.items():
                    found[f"{ours}.{module}.{part}.weight"] = p[
                        f"{theirs}.{j}.{name}.{letter}.weight"
                    ].T
            found[f"{ours}.feed_forward_norm.weight"] = p[
                f"{theirs}.{len(parts)}.layer_norm.weight"
            ]
            for part, letter in {"up": "wi", "down": "wo"}.items():
                found[f"{ours}.feed_forward.{part}.weight"] = p[
                    f"{theirs}.{len(parts)}.DenseReluDense.{letter}.weight"
                ].T
    return found


def t5_loss(model: torch.nn.Module, batch: Mapping[str, np.ndarray]) -> Callable[[], torch.Tensor]:
    ids, following = long(batch["ids"]), long(batch["following"])
    labels = torch.where(following == 0, -100, following)
    given = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "decoder_input_ids": long(batch["written"]),
    }
    return lambda: model(**given, labels=labels).loss


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 2])
def test_t5s_losses_weights_and_moments_are_those_of_hugging_faces_while_it_trains(layers):
    program = example("t5")
    config = program.T5Config(micro_batch_size=8, layers=layers, sequence_length=9, max_distance=6)
    model = hugging_face_t5(config)
    weights = t5_weights(random_weights(model), config)
    rng = np.random.default_rng(1)
    batches = [program.batch(rng, config) for _ in range(STEPS)]
    rate = 3e-3
    with program.training_session(config) as session:
        write(session, weights)
        losses = [program.train(session, batch, rate) for batch in batches]
        model = model.double()  # in float32 it is up to 3e-4 from this
        optimizer = adamw(model, rate, 0.0)
        expected = torch_losses(optimizer, (t5_loss(model, batch) for batch in batches))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert_same_state(session, lambda values: t5_weights(values, config), model, optimizer)


@pytest.mark.slow
def test_t5_in_float16_follows_hugging_faces_in_float32():
    program = example("t5")
    config = program.T5Config(micro_batch_size=8, dtype=popxl.float16, loss_scaling=64.0)
    model = hugging_face_t5(config)
    weights = t5_weights(random_weights(model), config)
    rng = np.random.default_rng(1)
    batches = [program.batch(rng, config) for _ in range(STEPS)]
    with program.training_session(config) as session:
        write(session, weights)
        losses = [program.train(session, batch, 3e-3) for batch in batches]
    expected = torch_losses(adamw(model, 3e-3, 0.0), (t5_loss(model, batch) for batch in batches))
    np.testing.assert_allclose(losses, expected, rtol=1e-2)


@pytest.mark.slow
def test_t5_writes_what_hugging_faces_does():
    program = example("t5")
    config = program.T5Config(micro_batch_size=8, layers=2)
    model = hugging_face_t5(config)
    weights = t5_weights(random_weights(model, 0.4), config)
    ids = program.batch(np.random.default_rng(1), config)["ids"]
    with program.answering_session(config) as session:
        write(session, weights)
        got = session.run({session.inputs.ids: ids})[session.outputs.written]
    written = torch.zeros(8, 1, dtype=torch.int64)
    for _ in range(config.sequence_length - 1):
        mask = (long(ids) != 0).long()
        scores = model(input_ids=long(ids), attention_mask=mask, decoder_input_ids=written).logits
        written = torch.cat([written, scores[:, -1:].argmax(-1)], 1)
    np.testing.assert_array_equal(got, written.numpy())
    assert len(np.unique(got)) > 5


# GPT-J, tensor parallel

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]


def hugging_face_gptj(config: Any) -> torch.nn.Module:
    settings = transformers.GPTJConfig(
        vocab_size=config.vocabulary_size, n_positions=config.sequence_length, n_embd=config.hidden_size,
        n_layer=config.layers, n_head=config.heads, rotary_dim=config.rotary_features, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPTJForCausalLM(settings)


def gptj_weights(p: Mapping[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """The weights of the example, whole, by Hugging Face's."""
    found = {
        "words.weight": p["transformer.wte.weight"],
        "norm.weight": p["transformer.ln_f.weight"],
        "norm.bias": p["transformer.ln_f.bias"],
        "head.weight": p["lm_head.weight"].T,
        "head.bias": p["lm_head.bias"],
    }
    for i in range(config.layers):
        theirs = f"transformer.h.{i}"
        found |= {f"{i}.norm.{name}": p[f"{theirs}.ln_1.{name}"] for name in ("weight", "bias")}
        for name, letter in {"query": "q", "key": "k", "value": "v", "output": "out"}.items():
            found[f"{i}.{name}.weight"] = p[f"{theirs}.attn.{letter}_proj.weight"].T
        found[f"{i}.up.weight"], found[f"{i}.up.bias"] = (
            p[f"{theirs}.mlp.fc_in.weight"].T,
            p[f"{theirs}.mlp.fc_in.bias"],
        )
        found[f"{i}.down.weight"], found[f"{i}.bias"] = (
            p[f"{theirs}.mlp.fc_out.weight"].T,
            p[f"{theirs}.mlp.fc_out.bias"],
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids="{0[0]} replicas of {0[1]} groups".format)
def test_tensor_parallel_inference_writes_the_words_that_hugging_face_writes(layout):
    program = example("tensor_parallel_inference")
    config = program.GPTJConfig(
        micro_batch_size=4 // layout[1],
        tensor_parallel=layout[0],
        data_parallel=layout[1],
        sequence_length=10,
    )
    model = hugging_face_gptj(config)
    prompts = np.random.default_rng(0).integers(0, config.vocabulary_size, (4, 3)).astype(np.int32)
    random_weights(model, 0.4)
    with program.inference_session(config, prompt=3) as session:
        program.load_weights(session, config, gptj_weights(by_name(model), config))
        said = program.write(session, config, np.pad(prompts, ((0, 0), (0, 7))))
    wanted = model.generate(
        long(prompts),
        max_new_tokens=7,
        do_sample=False,
        pad_token_id=0,
        attention_mask=torch.ones(4, 3).long(),
    )
    np.testing.assert_array_equal(said, wanted.numpy())
    assert len(np.unique(said[:, 3:])) > 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids="{0[0]} replicas of {0[1]} groups".format)
def test_tensor_parallel_scores_are_hugging_faces_on_every_replica(layout):
    program = example("tensor_parallel_inference")
    tp, dp = layout
    config = program.GPTJConfig(micro_batch_size=2, tensor_parallel=tp, data_parallel=dp)
    model = hugging_face_gptj(config)
    random_weights(model, 0.3)
    words = np.random.default_rng(0).integers(
        0, config.vocabulary_size, (dp, 2, config.sequence_length)
    )
    ir = popxl.Ir(replication=tp * dp)
    with ir.main_graph, popxl.in_sequence():
        inputs = popxl_addons.InputStreams(words=(words.shape[1:], popxl.int32))
        facts, graph = program.GPTJ(config).create_graph(
            inputs.words.spec, popxl.TensorSpec((1,), popxl.uint32)
        )
        state = popxl_addons.NamedTensors(fwd=facts.init())
        position = popxl.constant([7], popxl.uint32)
        (scores,) = graph.bind(state.fwd).call(popxl.ops.host_load(inputs.words), position)
        outputs = popxl_addons.OutputStreams(scores=(scores.shape, scores.dtype))
        popxl.ops.host_store(outputs.scores, scores)
    with TaskSession(inputs, outputs, state, ir=ir) as session:
        program.load_weights(session, config, gptj_weights(by_name(model), config))
        fed = np.repeat(words, tp, axis=0).reshape(session._full_input_shape(words.shape[1:]))
        got = session.run({inputs.words: fed.astype(np.int32)})[outputs.scores].reshape(
            dp, tp, *scores.shape
        )
    for group, of in zip(got, words):
        expected = model(long(of)).logits[:, 7].detach().numpy()
        for replica in group:
            np.testing.assert_allclose(replica, expected, rtol=1e-4, atol=1e-4)


# digits, data parallel


class TorchNet(torch.nn.Module):
    """The example's network, without dropout."""

    def __init__(self, config: Any, size: int) -> None:
        super().__init__()
        channels = config.channels
        self.conv1, self.norm1 = (
            torch.nn.Conv2d(1, channels, 3, padding=1),
            torch.nn.GroupNorm(2, channels),
        )
        self.conv2 = torch.nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm2 = torch.nn.GroupNorm(2, 2 * channels)
        self.linear1 = torch.nn.Linear(2 * channels * (size // 4) ** 2, config.hidden_size)
        self.linear2 = torch.nn.Linear(config.hidden_size, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm1(self.conv1(images))), 2)
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm2(self.conv2(x))), 2)
        return self.linear2(torch.relu(self.linear1(x.flatten(1))))


def net_weights(p: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value.T if "linear" in name else value for name, value in p.items()}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_data_parallel_training_is_torchs_on_the_images_of_all_replicas(replicas):
    program = example("mnist_data_parallel")
    config = program.MnistConfig(replicas=replicas, micro_batch_size=16 // replicas, dropout=0.0)
    model = TorchNet(config, program.SIZE)
    weights = net_weights(random_weights(model))
    rng = np.random.default_rng(1)
    batches = [program.digits(rng, 16) for _ in range(STEPS)]

    def loss_of(images: np.ndarray, labels: np.ndarray) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(torch.tensor(images)), long(labels))

    with program.training_session(config) as session:
        write(session, weights)
        by_replica = ([a.reshape(replicas, -1, *a.shape[1:]) for a in batch] for batch in batches)
        losses = [program.train(session, *arrays) for arrays in by_replica]
        optimizer = adamw(model, config.learning_rate, 0.0)
        expected = torch_losses(optimizer, ((lambda b=batch: loss_of(*b)) for batch in batches))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert_same_state(session, net_weights, model, optimizer)
        with program.test_session(config, 16) as testing:
            testing.load_from_session(session)
            images = batches[0][0]
            said = testing.run({testing.inputs.images: images})[testing.outputs.digits]
    np.testing.assert_array_equal(said, model(torch.tensor(images)).argmax(1))


@pytest.mark.slow
def test_data_parallel_replicas_drop_different_features_and_others_in_every_step():
    program = example("mnist_data_parallel")
    images, labels = program.digits(np.random.default_rng(0), 4)
    losses = []
    # the second replica's images are the first one's: without dropout the losses were equal
    for replicas in (1, 2):
        config = program.MnistConfig(
            replicas=replicas, micro_batch_size=4, dropout=0.5, learning_rate=0.0
        )
        with program.training_session(config) as session:
            write(
                session,
                {n: v + 0.1 for n, v in session.get_named_tensors_data().fwd.to_dict().items()},
            )
            fed = np.stack([images] * replicas), np.stack([labels] * replicas)
            losses += [program.train(session, *fed) for _ in range(2)]
    assert len(set(losses)) == 4


# custom optimizer


def test_the_custom_optimizer_is_torchs_also_after_a_checkpoint(tmp_path):
    program = example("custom_optimizer")
    layers = {
        "hidden": torch.nn.Linear(2, program.HIDDEN),
        "relu": torch.nn.ReLU(),
        "out": torch.nn.Linear(program.HIDDEN, 2),
    }
    model = torch.nn.Sequential(OrderedDict(layers))

    def ours(values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: value.T for name, value in values.items()}

    with program.training_session() as session:
        write(session, ours(random_weights(model, 0.5)))
        losses = [program.train(session, step) for step in range(10)]
        session.save_checkpoint(str(tmp_path / "saved"))
    with program.training_session() as session:
        session.load_checkpoint(str(tmp_path / "saved"), report_missing="error")
        losses += [program.train(session, step) for step in range(10, 20)]
        state = session.get_named_tensors_data()

    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 1e-3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = clipping(torch.optim.SGD(groups, lr=0.5, momentum=0.9, nesterov=True), model, 0.5)

    def loss_of(step: int) -> torch.Tensor:
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * (1 - step / program.STEPS)
        points, labels = program.batch(step)
        return torch.nn.functional.cross_entropy(model(torch.tensor(points)), long(labels))

    expected = torch_losses(optimizer, ((lambda step=step: loss_of(step)) for step in range(20)))
    assert any(optimizer.clipped) and not all(optimizer.clipped)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, value in ours(by_name(model)).items():
        np.testing.assert_allclose(state.fwd[name], value, rtol=1e-4, atol=1e-6)
    for name, value in ours(moments(optimizer, model, "momentum_buffer")).items():
        np.testing.assert_allclose(state.optim[name].velocity, value, rtol=1e-3, atol=1e-5)


# programs that are one script: their sessions are recorded


class Recorded(popxl.Session):
    """A session that keeps the values of the variables before the first run, and what runs took and
    gave.
    """

    sessions: "list[Recorded]" = []

    def __enter__(self) -> "Recorded":
        super().__enter__()
        self.before = self.get_tensors_data(self.ir.main_graph.variables)
        self.runs: list = []
        Recorded.sessions.append(self)
        return self

    def run(self, inputs: Any = None, downcast_inputs: bool = True) -> Any:
        outputs = super().run(inputs, downcast_inputs)
        self.runs.append((dict(inputs), dict(outputs)))
        return outputs


@pytest.fixture
def recorded(monkeypatch, capsys) -> "Callable[[str], tuple[SimpleNamespace, Recorded]]":
    """Runs an example: its globals, and its session."""
    monkeypatch.setattr(popxl, "Session", Recorded)
    monkeypatch.setattr(Recorded, "sessions", [])

    def run(name: str) -> "tuple[SimpleNamespace, Recorded]":
        globals_ = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        (session,) = Recorded.sessions
        return SimpleNamespace(**globals_), session

    return run


def perceptron(
    before: Mapping[Any, np.ndarray], *layers: Any, between: torch.nn.Module
) -> torch.nn.Module:
    """Linear layers with the values that these variables had before the first run."""
    modules: list[torch.nn.Module] = []
    for variables in layers:
        weight, bias = (
            torch.tensor(before[variables.weight]).T,
            torch.tensor(before[variables.bias]),
        )
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        modules += [between, linear] if modules else [linear]
    return torch.nn.Sequential(*modules)


def losses_of_one_batch(model: torch.nn.Module, x: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    """The losses of each micro-batch: x [micro-batches, B, ...], labels [micro-batches, B]."""
    scores = model(torch.tensor(x))
    losses = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), long(labels).flatten(), reduction="none"
    )
    return losses.reshape(labels.shape).mean(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipelining", "phased_execution"])
def test_training_in_stages_or_phases_has_the_losses_of_torch_in_one_piece(name, recorded):
    program, session = recorded(name)
    if name == "pipelining":
        layers, between, rate = (program.weights0.linear, program.weights1), torch.nn.Tanh(), 1.0
        streams = program.x_stream, program.label_stream, program.loss_stream
    else:
        layers, between, rate = (
            (program.weights.linear, program.head_weights),
            torch.nn.ReLU(),
            0.05,
        )
        streams = program.images, program.labels, program.losses
    model = perceptron(session.before, *layers, between=between)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    assert len(session.runs) > 30
    for inputs, outputs in session.runs:
        losses = losses_of_one_batch(model, *(inputs[stream] for stream in streams[:2]))
        np.testing.assert_allclose(
            outputs[streams[2]], losses.detach().numpy(), rtol=1e-3, atol=1e-5
        )
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    for variables, linear in zip(layers, model[::2]):
        np.testing.assert_allclose(
            session.get_tensor_data(variables.weight),
            linear.weight.detach().numpy().T,
            rtol=1e-3,
            atol=1e-4,
        )


def test_remote_variables_are_what_the_layers_compute_with_and_what_they_store(recorded):
    program, session = recorded("remote_variables")
    weights, biases = ([session.before[v] for v in of] for of in (program.weights, program.biases))
    for inputs, outputs in session.runs:
        y = inputs[program.x_stream]
        for layer, bias in enumerate(biases):
            y = y * weights[layer] + bias
            weights[layer] = weights[layer] / 2
        np.testing.assert_array_equal(outputs[program.y_stream], y)
    for variable, weight in zip(program.weights, weights):
        np.testing.assert_array_equal(session.get_tensor_data(variable), weight)


def test_a_custom_modules_gradients_are_torchs(recorded):
    program, session = recorded("custom_module")
    ((inputs, outputs),) = session.runs
    (x,) = (
        torch.tensor(value, dtype=torch.float32, requires_grad=True) for value in inputs.values()
    )

    def gated(x: torch.Tensor, variables: Any) -> "tuple[torch.Tensor, dict[str, torch.Tensor]]":
        p = {
            n: torch.tensor(session.before[v], requires_grad=True)
            for n, v in variables.to_dict().items()
        }
        value = x @ p["value.weight"] + p["value.bias"]
        return torch.sigmoid(x @ p["gate.weight"]) * value * p["scale"], p

    between, p = gated(x, program.first)
    between.sum().backward()
    expected = {
        "y": gated(between, program.second)[0],
        "dx": x.grad,
        **{f"d {n}": t.grad for n, t in p.items()},
    }
    assert sorted(expected) == sorted(program.streams)
    for name, stream in program.streams.items():
        np.testing.assert_allclose(
            outputs[stream], expected[name].detach().numpy(), rtol=1e-5, atol=1e-8
        )
