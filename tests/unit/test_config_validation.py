"""What a configuration may not be, and the words that say so."""

import pytest

from popxl_gpt.config.presets import from_mapping, override, preset
from popxl_gpt.config.schema import Config, Model, Training
from popxl_gpt.config.validation import validate
from popxl_gpt.utils.errors import ConfigError

REFUSALS = [
    ({"layers": 0}, "layers: got 0; expected a whole number, at least 1."),
    ({"layers": 2.0}, "layers: got 2.0; expected a whole number, at least 1."),
    ({"layers": True}, "layers: got True; expected a whole number"),
    (
        {"layers": "3"},
        "layers: got '3'; expected a whole number, at least 1. Write it without quotes.",
    ),
    ({"layers": None}, "layers: got None; expected a whole number"),
    ({"dropout": 1.0}, "dropout: got 1.0; expected a number, at least 0 and below 1."),
    ({"dropout": float("nan")}, "dropout: got nan; expected a number"),
    ({"learning_rate": 0.0}, "learning_rate: got 0.0; expected a number, more than 0."),
    ({"learning_rate": float("inf")}, "learning_rate: got inf; expected a number, more than 0."),
    (
        {"precision": "float64"},
        "precision: got 'float64'; expected one of float32, float16, bfloat16.",
    ),
    ({"recomputation": 1}, "recomputation: got 1; expected true or false."),
    (
        {"seed": 2**32},
        "seed: got 4294967296; expected a whole number, at least 0 and below 4294967296.",
    ),
    (
        {"input_files": "a.tfrecord"},
        "input_files: got 'a.tfrecord'; expected a list of texts, none of them empty.",
    ),
    (
        {"input_files": ["a", 3]},
        "input_files: got ['a', 3]; expected a list of texts, none of them empty.",
    ),
    ({"memmap_dir": ""}, "memmap_dir: got ''; expected text, or none."),
    (
        {"device": "tpu"},
        "device: got 'tpu'; expected auto, cpu, cuda or cuda:N. Give one of these.",
    ),
    (
        {"device_memory": 0},
        (
            "device_memory: got 0; expected a whole number of bytes, or with a unit (KiB, MiB, "
            "GiB, TiB)"
        ),
    ),
    *(
        (
            {"device_memory": value},
            f"device_memory: got {value!r}; expected a whole number of bytes, or with a unit "
            "(KiB, MiB, GiB, TiB), a share such as 0.5 or 50%, auto, or none.",
        )
        for value in (1.5, 0.0, -0.5, float("nan"), "half", "%", True)
    ),
    ({"device_memory": "150%"}, "device_memory: got 1.5; expected a whole number of bytes"),
    (
        {"host_memory": 0},
        "host_memory: got 0; expected a whole number of bytes, or with a unit (KiB, MiB, GiB, TiB)",
    ),
    (
        {"host_memory": "2 miles", "memmap_dir": "there"},
        "host_memory: got '2 miles'; expected a whole number of bytes",
    ),
    (
        {"host_memory": "2GB", "memmap_dir": "there"},
        "host_memory: got '2GB'; expected a whole number of bytes",
    ),
    (
        {"host_memory": 2**30},
        "host_memory: got 1073741824 while memmap_dir is none; expected a folder for what does",
    ),
    (
        {"moment_precision": "float16"},
        "moment_precision: got 'float16'; expected one of float32, bfloat16, 8bit.",
    ),
    (
        {"moment_precision": "bfloat16"},
        (
            "moment_precision: got bfloat16 while stochastic_rounding is false; expected true, "
            "for what a step adds"
        ),
    ),
    (
        {"products": "fp8", "layers": 2},
        "products: got fp8 with layers 2; expected at least 3, for the first and the last block",
    ),
    (
        {"gradient_precision": "bfloat16"},
        (
            "gradient_precision: got bfloat16 while stochastic_rounding is false; expected true, "
            "for gradients rounded"
        ),
    ),
    (
        {"moment_precision": "8bit", "stochastic_rounding": True, "optimizer": "muon"},
        "moment_precision: got 8bit with optimizer muon; expected float32 or bfloat16",
    ),
    (
        {"decay_steps": 5},
        "decay_steps: got 5 with schedule constant; expected linear, cosine or wsd, which fall. Give",
    ),
    (
        {"schedule": "wsd", "steps": 20, "warmup_steps": 10, "decay_steps": 11},
        "decay_steps: got 11; expected at most steps - warmup_steps = 10. Lower it.",
    ),
    (
        {"train_samples": 5},
        "train_samples: got 5 while input_files is empty; expected files. Give --input_files, or",
    ),
    ({"name": "a/b"}, "name: got 'a/b'; expected a name for a folder."),
    ({"name": ".."}, "name: got '..'; expected a name for a folder."),
    (
        {"hidden_size": 66},
        "hidden_size: got 66; expected a multiple of heads = 4. Use 64 or 68, or change heads.",
    ),
    (
        {"head_size": 7, "position_embedding": "rotary"},
        "head_size: got 7 with position_embedding rotary; expected an even number, for features",
    ),
    *(
        (
            {"rotary_fraction": share, "position_embedding": "rotary", "head_size": 10},
            f"rotary_fraction: got {share}, which is {features} of a head's 10 features; expected "
            f"an even number, 2 or more, for they turn in pairs. Use {fitting}.",
        )
        for share, features, fitting in ((0.1, 1, 0.25), (0.39, 3, 0.25), (0.9, 9, 0.85))
    ),
    (
        {"zero_centered_gains": True},
        "zero_centered_gains: got true with norm layer_norm; expected norm rms_norm, whose gains",
    ),
    (
        {"rotary_scaling": "llama3", "position_embedding": "rotary"},
        "rotary_original_positions: got none with rotary_scaling llama3; expected the tokens of",
    ),
    (
        {
            "rotary_scaling": "yarn",
            "position_embedding": "rotary",
            "rotary_original_positions": 8,
            "rotary_slow_turns": 32.0,
        },
        "rotary_fast_turns: got 32; expected more than rotary_slow_turns = 32. Raise it.",
    ),
    (
        {
            "rotary_scaling": "yarn",
            "position_embedding": "rotary",
            "rotary_original_positions": 8,
            "rotary_base": 1.0,
        },
        "rotary_base: got 1 with rotary_scaling yarn; expected more than 1, as 10000 is.",
    ),
    (
        {
            "rotary_scaling": "yarn",
            "position_embedding": "rotary",
            "rotary_original_positions": 8,
            "layer_pattern": ("sliding", "full"),
            "window": 4,
            "sliding_rotary_base": 1.0,
        },
        "sliding_rotary_base: got 1 with rotary_scaling yarn; expected more than 1, as 10000 is. Raise it, or",
    ),
    (
        {"hidden_size": 2, "rotary_fraction": 0.5},
        "hidden_size: got 2; expected a multiple of heads = 4. Use 4, or change heads.",
    ),
    (
        {
            "rotary_scaling": "dynamic",
            "position_embedding": "rotary",
            "rotary_original_positions": 8,
            "head_size": 8,
            "rotary_fraction": 0.25,
        },
        "rotary_scaling: got dynamic with heads of 2 features; expected more, for their one pair",
    ),
    (
        {"tensor_parallel_1": 3},
        "heads: got 4; expected a multiple of tensor_parallel_1 = 3. Use tensor_parallel_1 = 2, or change heads.",
    ),
    (
        {"tensor_parallel_2": 3},
        "hidden_size: got 64; expected a multiple of tensor_parallel_2 = 3. Use tensor_parallel_2 = 2, or",
    ),
    (
        {"feed_forward_size": 66, "tensor_parallel_1": 4},
        "feed_forward_size: got 66; expected a multiple of tensor_parallel_1 = 4. Use tensor_parallel_1 = 3, or",
    ),
    (
        {
            "hidden_size": 9,
            "head_size": 4,
            "heads": 8,
            "tensor_parallel_1": 8,
            "tensor_parallel_2": 1,
        },
        "feed_forward_size: got 36; expected a multiple of tensor_parallel_1 = 8. Use tensor_parallel_1 = 6, or",
    ),
    (
        {
            "inference_micro_batch_size": 3,
            "head_serialisation": 8,
            "inference_head_serialisation": 5,
        },
        "inference_head_serialisation: got 5; expected a divisor of the rows of a run of the head, widening "
        "* inference_micro_batch_size * sequence_length = 24. Use 1.",
    ),
    (
        {"vocabulary_size": 7, "tensor_parallel_1": 4, "embedding_serialisation": 3},
        "embedding_serialisation: got 3; expected at most 2, the rows of the embedding that a replica holds",
    ),
    (
        {"attention_serialisation": 3},
        "sequence_length: got 8; expected a multiple of attention_serialisation = 3.",
    ),
    (
        {"activation_memory": 1024, "recomputation": False},
        "activation_memory: got 1024 while recomputation is false, which keeps all there is; expected "
        "true, for what the memory does not hold. Give --recomputation, or leave --activation_memory out.",
    ),
    (
        {"minutes": 2.0**63, "schedule": "wsd"},
        "minutes: got 9.223372036854776e+18; expected at most 10000000. Lower it.",
    ),
    (
        {"head_serialisation": 12},
        "head_serialisation: got 12; expected a divisor of the rows of a run of the head, "
        "widening * micro_batch_size * sequence_length = 8. Use 4.",
    ),
    (
        {"key_value_heads": 3},
        "heads: got 4; expected a multiple of key_value_heads = 3. Use 3 or 6",
    ),
    (
        {"key_value_heads": 2, "tensor_parallel_1": 4},
        "key_value_heads: got 2; expected a multiple of tensor_parallel_1 = 4. Use tensor_parallel_1 = 2, or",
    ),
    (
        {"position_embedding": "rotary", "hidden_size": 36},
        "position_embedding: got rotary with heads of hidden_size / heads = 9 features; expected",
    ),
    (
        {"lora_rank": 65},
        "lora_rank: got 65; expected at most hidden_size = 64, for a wider adapter is no smaller",
    ),
    (
        {"lora_rank": 4, "optimizer": "muon"},
        "optimizer: got muon with lora_rank = 4; expected adamw, which updates adapters",
    ),
    (
        {"end_of_text": 128},
        "end_of_text: got 128; expected a token below vocabulary_size = 128. Use the end_of_text",
    ),
    (
        {"max_positions": 4},
        (
            "sequence_length: got 8; expected at most max_positions = 4. Shorten the sequence or "
            "raise max_positions."
        ),
    ),
    (
        {"global_batch_size": 30, "data_parallel": 4, "micro_batch_size": 2},
        (
            "global_batch_size: got 30; expected a multiple of data_parallel * micro_batch_size "
            "= 8. Use 24 or 32."
        ),
    ),
    (
        {"micro_batch_size": 16},
        "global_batch_size: got 8; expected a multiple of data_parallel * micro_batch_size = 32.",
    ),
    ({"widening": 0}, "widening: got 0; expected a whole number, at least 1."),
    (
        {"widening": 3},
        "widening: got 3; expected a divisor of the micro-batches per step, global_batch_size / "
        "(data_parallel * micro_batch_size) = 4. Use 2 or 4.",
    ),
    ({"widening": 8}, "(data_parallel * micro_batch_size) = 4. Use 4."),
    ({"widening": 2, "micro_batch_size": 4}, "(data_parallel * micro_batch_size) = 1. Use 1."),
    (
        {"minutes": 3.0},
        "minutes: got 3 with schedule constant; expected wsd, which ends when it is told. Give",
    ),
    ({"minutes": 0.0}, "minutes: got 0.0; expected a number, more than 0"),
    (
        {"rampup_batch_size": 2},
        "rampup_tokens: got none with rampup_batch_size = 2; expected the tokens over which the",
    ),
    (
        {"rampup_tokens": 100},
        "rampup_tokens: got 100 without rampup_batch_size; expected the batch that a ramp begins",
    ),
    (
        {"rampup_increment": 2},
        "rampup_increment: got 2 without rampup_batch_size; expected the batch that a ramp begins",
    ),
    (
        {"rampup_batch_size": 8, "rampup_tokens": 100},
        "rampup_batch_size: got 8; expected fewer than global_batch_size = 8. Lower it, or leave",
    ),
    (
        {"rampup_batch_size": 6, "rampup_tokens": 100},
        "rampup_batch_size: got 6; expected a number from which global_batch_size = 8 is reached "
        "by doubling. Change it, or --rampup_increment.",
    ),
    (
        {"rampup_batch_size": 2, "rampup_increment": 4, "rampup_tokens": 100},
        "global_batch_size = 8 is reached in steps of rampup_increment = 4. Change it",
    ),
    (
        {"rampup_batch_size": 1, "rampup_tokens": 100},
        "rampup_batch_size: got 1, and so a stage of 1 sequences; expected multiples of "
        "data_parallel * micro_batch_size * widening = 2. Use 2, or change one of the three.",
    ),
    (
        {
            "global_batch_size": 2**30,
            "rampup_batch_size": 2,
            "rampup_increment": 2,
            "rampup_tokens": 9,
        },
        "stages; expected at most 64, for each is a program of its own. Raise it.",
    ),
    (
        {"minimum_learning_rate": 1.0},
        "minimum_learning_rate: got 1; expected at most learning_rate = 0.001.",
    ),
    (
        {"device_iterations": 3},
        "steps: got 20; expected a multiple of device_iterations = 3. Use 18 or 21",
    ),
    (
        {"device_iterations": 2, "validate_every": 5},
        "validate_every: got 5; expected a multiple of device_iterations",
    ),
    (
        {"device_iterations": 2, "every": 5},
        "every: got 5; expected a multiple of device_iterations = 2. Use 4 or 6",
    ),
    (
        {"validation_files": ("a",)},
        "validation_files: got files while input_files is empty; expected both or none",
    ),
    (
        {"input_files": ("a",), "validate_every": 5},
        "validation_files: got none; expected files, for validate_every is 5.",
    ),
    (
        {"validation_batches": "all", "validate_every": 5},
        "validation_batches: got all while input_files is empty; expected a number, for",
    ),
    ({"validate_first": True}, "validate_first: got true while validate_every is 0; expected"),
    ({"validate_training": True}, "validate_training: got true while validate_every is 0;"),
    ({"layer": 3}, "config: unknown key 'layer'. Did you mean 'layers'?"),
]


@pytest.mark.parametrize(
    "values, words", REFUSALS, ids=[" ".join(values) for values, _ in REFUSALS]
)
def test_refusals_say_what_was_given_expected_and_how_to_fix_it(values, words):
    with pytest.raises(ConfigError) as caught:
        preset("tiny", **values)
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1, "one mistake is one problem"


@pytest.mark.parametrize(
    "values, words",
    [
        (
            {"device_iterations": 3},
            "steps: got 20; expected a multiple of device_iterations = 3. Use 18 or 21",
        ),
        (
            {"schedule": "wsd", "decay_steps": 30},
            "decay_steps: got 30; expected at most steps - warmup_steps = 20. Lower it.",
        ),
    ],
)
def test_steps_are_checked_once_the_data_say_how_many_there_are(values, words):
    waiting = preset("tiny", epochs=1.0, **values)
    assert override(waiting, steps=60).training.steps == 60
    with pytest.raises(ConfigError) as caught:
        override(waiting, steps=20)
    assert len(caught.value.problems) == 1 and words in str(caught.value)


def test_a_run_that_the_clock_ends_may_have_calls_of_any_number_of_steps():
    validate(preset("tiny", minutes=1.0, schedule="wsd", device_iterations=3))


SLIPS = [
    (
        {"execution": {"micro_batch": 2}},
        "config.execution: unknown key 'micro_batch'. Did you mean 'micro_batch_size'?",
    ),
    (
        {"execution": {"layers": 2}},
        "config.execution: unknown key 'layers'. It belongs to config.model.",
    ),
    ({"layers": 2}, "config: unknown key 'layers'. It belongs to config.model."),
    ({"modle": {}}, "config: unknown key 'modle'. Did you mean 'model'?"),
    ({"model": 3}, "config.model: got 3; expected settings by name."),
]


@pytest.mark.parametrize("mapping, words", SLIPS)
def test_unknown_keys_are_refused_with_a_suggestion(mapping, words):
    with pytest.raises(ConfigError) as caught:
        from_mapping(mapping)
    assert caught.value.problems == (words,)


def test_every_problem_is_told_at_once():
    mapping = {
        "model": {"layers": 0, "hidden_size": 100, "heads": 3, "width": 2},
        "training": {"global_batch_size": 7, "schedule": "cosin"},
        "execution": {"micro_batch_size": 2},
    }
    with pytest.raises(ConfigError) as caught:
        from_mapping(mapping)
    places = sorted(problem.split(":")[0] for problem in caught.value.problems)
    assert places == ["config.model", "global_batch_size", "hidden_size", "layers", "schedule"]
    assert str(caught.value).startswith("configuration: 5 problems.\n  1. ")


def test_a_wrong_leaf_is_not_blamed_on_others():
    with pytest.raises(ConfigError) as caught:
        preset("tiny", heads="three", global_batch_size=0)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "heads",
        "global_batch_size",
    ]
    with pytest.raises(ConfigError) as caught:
        preset("tiny", heads=0, micro_batch_size=0, device_iterations=0)
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "heads",
        "micro_batch_size",
        "device_iterations",
    ]


def test_the_number_of_replicas_that_were_started_must_fit():
    found = preset("tiny", data_parallel=2, tensor_parallel_1=2, tensor_parallel_2=1)
    validate(found, replicas=4)
    with pytest.raises(ConfigError) as caught:
        validate(found, replicas=8)
    assert (
        "replicas: got 8 from the launcher; expected data_parallel * tensor_parallel_1 * "
        "tensor_parallel_2 = "
    ) in str(caught.value)
    assert "2 * 2 * 1 = 4" in str(caught.value)
    assert "(poprun --num-replicas 4; with torchrun set POPDIST_NUM_TOTAL_REPLICAS=4)" in str(
        caught.value
    )


def test_processes_keep_their_replicas_in_inference():
    found = preset("tiny", inference_data_parallel=3)
    validate(found)
    with pytest.raises(ConfigError, match="inference_data_parallel: got 3 with a launcher; expec"):
        validate(found, replicas=8)
    validate(preset("tiny", inference_data_parallel=2), replicas=8)


def test_configurations_built_in_python_are_checked_too():
    broken = Config(model=Model(layers=-1), training=Training(global_batch_size=0))
    with pytest.raises(ConfigError) as caught:
        validate(broken)
    assert len(caught.value.problems) == 2


def test_whole_numbers_serve_as_numbers():
    found = preset("tiny", learning_rate=1, max_norm=0)
    assert (found.training.learning_rate, type(found.training.learning_rate)) == (1.0, float)
    assert type(found.training.max_norm) is float
