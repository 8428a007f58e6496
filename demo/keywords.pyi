# Written by imgs/write_tables.py: the settings of the commands, by keyword.
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from typing_extensions import Unpack as Unpack

class TrainSettings(TypedDict, total=False):
    config: str | Path
    name: str
    layers: int
    hidden_size: int
    heads: int
    head_size: int | None
    key_value_heads: int | None
    sequence_length: int
    vocabulary_size: int
    layer_pattern: str | Sequence[str]
    window: int | None
    max_positions: int | None
    feed_forward_size: int | None
    norm: Literal["layer_norm", "rms_norm"]
    norm_placement: Literal["before", "after", "around"]
    zero_centered_gains: bool
    parallel_branches: bool
    embedding_scale: float
    position_embedding: Literal["learned", "rotary"]
    rotary_base: float
    rotary_fraction: float
    rotary_scaling: Literal["linear", "dynamic", "llama3", "yarn"] | None
    rotary_factor: float
    rotary_original_positions: int | None
    rotary_slow_turns: float
    rotary_fast_turns: float
    rotary_attention_factor: float | None
    sliding_rotary_base: float | None
    sliding_rotary_scaling: bool
    token_shift: bool
    bigram_rows: int
    convolution_size: int
    qk_norm: bool
    qk_norm_over: Literal["head", "all"]
    value_embeddings: bool
    activation: Literal["gelu", "gelu_exact", "relu2", "swiglu", "geglu"]
    biases: bool
    qkv_biases: bool | None
    tied_head: bool
    logit_softcap: float
    attention_scale: float | None
    score_softcap: float
    dropout: float
    attention_serialisation: int
    lora_rank: int
    lora_alpha: float
    document_attention: bool
    end_of_text: int
    precision: Literal["float32", "float16", "bfloat16"]
    products: Literal["precision", "fp8"]
    initial_std: float
    initialisation: Literal["fixed", "width"]
    zero_init_residual: bool
    layer_norm_eps: float
    steps: int
    epochs: float | None
    minutes: float | None
    global_batch_size: int
    rampup_batch_size: int | None
    rampup_increment: int | None
    rampup_tokens: int | None
    learning_rate: float
    minimum_learning_rate: float
    embedding_rate_multiplier: float
    schedule: Literal["constant", "linear", "cosine", "wsd"]
    decay_steps: int | None
    warmup_steps: int
    warmup_proportion: float | None
    base_batch_size: int | None
    batch_scaling: Literal["linear", "sqrt"]
    optimizer: Literal["adamw", "muon"]
    muon_momentum: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    average_weights: int
    max_norm: float
    updates: bool
    loss_scaling: float | Literal["auto"]
    loss_scaling_window: int
    max_skipped: int
    masked_labels: bool
    z_loss: float
    on_spike: Literal["off", "skip", "stop"]
    spike_threshold: float
    spike_window: int
    moment_precision: Literal["float32", "bfloat16", "8bit"]
    gradient_precision: Literal["float32", "bfloat16"]
    reduce_precision: Literal["float32", "bfloat16"]
    stochastic_rounding: bool
    master_weights: bool | None
    seed: int
    validate_every: int
    validation_batches: int | Literal["all"]
    validate_first: bool
    validate_training: bool
    input_files: str | Path | Sequence[str | Path]
    mix: str | Sequence[str]
    validation_files: str | Path | Sequence[str | Path]
    train_samples: int | None
    skip_damaged: bool
    tokenizer: str | Path | None
    micro_batch_size: int
    gradient_accumulation_steps: int | None
    widening: int
    micro_batch_group: int | None
    interleaving: int
    data_parallel: int
    tensor_parallel_1: int
    tensor_parallel_2: int
    device_iterations: int
    recomputation: bool
    activation_memory: int | str | None
    head_serialisation: int
    embedding_serialisation: int
    replicated_tensor_sharding: bool
    device: str
    device_memory: int | float | str | None
    memmap_dir: str | Path | None
    host_memory: int | str | None
    io_mode: Literal["compute", "io", "io_overlapped"]
    check_replicas: int
    inference_data_parallel: int | None
    inference_micro_batch_size: int | None
    inference_device_iterations: int | None
    inference_head_serialisation: int | None
    load: str | Path | None
    init_from: str | Path | None
    save: str | Path | None
    every: int
    every_minutes: float
    every_validation: bool
    keep: int
    run_folder: str | Path
    log_every: int
    norms_every: int
    log_level: Literal["debug", "info", "warning", "error"] | None
    tensorboard: bool
    wandb: bool
    wandb_name: str | None
    wandb_tags: str | Sequence[str]
    wandb_project: str
    ipu_config: str | Path | None
    limit: bool
    print_schedule: bool
    profile_every: int
    samples: int
    sample_every: int

class EvaluateSettings(TypedDict, total=False):
    sequence_length: int
    attention_serialisation: int
    precision: Literal["float32", "float16", "bfloat16"]
    skip_damaged: bool
    tokenizer: str | Path | None
    micro_batch_size: int
    widening: int
    data_parallel: int
    tensor_parallel_1: int
    tensor_parallel_2: int
    head_serialisation: int
    replicated_tensor_sharding: bool
    device: str
    device_memory: int | float | str | None
    memmap_dir: str | Path | None
    host_memory: int | str | None
    log_level: Literal["debug", "info", "warning", "error"] | None

class GenerateSettings(TypedDict, total=False):
    precision: Literal["float32", "float16", "bfloat16"]
    seed: int
    tokenizer: str | Path | None
    data_parallel: int
    tensor_parallel_1: int
    tensor_parallel_2: int
    replicated_tensor_sharding: bool
    device: str
    device_memory: int | float | str | None
    memmap_dir: str | Path | None
    host_memory: int | str | None
    log_level: Literal["debug", "info", "warning", "error"] | None

class PrepareSettings(TypedDict, total=False):
    output: str | Path
    sequence_length: int
    minutes: float | None
    vocabulary_size: int | None
    tokenizer: str | Path | None
    eos_token: str | None
    min_tokens: int | None
    stride: int | None
    tokenizer_bytes: int
    validation: float | None
    seed: int
    max_bytes: int | None
    shard_bytes: int
    workers: int
    overwrite: bool
    validation_files: str | Path | Sequence[str | Path]
    skip_damaged: bool
    documents: Literal["file", "paragraph", "line", "json"]
    text_field: str
    plain_text: bool
    document_bytes: int
    chat_template: bool

class ConvertSettings(TypedDict, total=False):
    positions: int | None
    overwrite: bool
    file_bytes: int
    precision: Literal["float32", "float16", "bfloat16"] | None
    family: str | None
    type: Literal["f32", "f16", "bf16", "q8_0"] | None
