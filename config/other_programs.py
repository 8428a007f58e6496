"""What other programs that train and use GPTs call their settings, and what those are here."""

from collections.abc import Collection

SAME = {
    # nanoGPT, and programs that follow it
    "always_save_checkpoint": "every_validation", "batch_size": "micro_batch_size",
    "bias": "biases", "block_size": "sequence_length", "ckpt": "checkpoint", "context_length":
    "sequence_length", "dataset": "input_files", "decay_lr": "schedule", "dtype": "precision",
    "eval_interval": "validate_every", "eval_iters": "validation_batches",
    "gas": "gradient_accumulation_steps", "grad_clip": "max_norm", "log_interval": "log_every",
    "lr": "learning_rate", "max_iters": "steps",
    "max_new_tokens": "tokens", "min_lr": "minimum_learning_rate", "n_embd": "hidden_size",
    "n_head": "heads", "n_kv_head": "key_value_heads", "n_layer": "layers", "num_heads": "heads",
    "num_layers": "layers", "num_samples": "samples", "out_dir": "run_folder", "resume": "load",
    "seq_len": "sequence_length", "start": "prompt", "use_wandb": "wandb", "wandb_log": "wandb",
    "wandb_run_name": "wandb_name", "warmup_iters": "warmup_steps",
    # Hugging Face: the Trainer, its example scripts, configurations of models, PEFT
    "adam_beta1": "beta1", "adam_beta2": "beta2", "adam_eps": "epsilon",
    "adam_epsilon": "epsilon", "eval_steps": "validate_every",
    "gradient_checkpointing": "recomputation", "head_dim": "head_size",
    "intermediate_size": "feed_forward_size",
    "logging_steps": "log_every", "lora_r": "lora_rank",
    "lr_scheduler_type": "schedule", "max_grad_norm": "max_norm",
    "max_position_embeddings": "max_positions", "max_seq_len": "sequence_length",
    "max_seq_length": "sequence_length", "max_steps": "steps",
    "max_train_samples": "train_samples", "model": "init_from",
    "model_name": "init_from", "model_name_or_path": "init_from", "n_ctx": "max_positions",
    "n_positions": "max_positions", "num_attention_heads": "heads",
    "num_hidden_layers": "layers", "num_key_value_heads": "key_value_heads",
    "num_return_sequences": "samples", "num_train_epochs": "epochs", "optim": "optimizer",
    "output_dir": "run_folder", "per_device_train_batch_size": "micro_batch_size",
    "report_to": "wandb", "resume_from_checkpoint": "load", "rope_scaling": "rotary_scaling",
    "rope_theta": "rotary_base",
    "run_name": "name", "save_steps": "every", "save_total_limit": "keep",
    "tie_word_embeddings": "tied_head", "tokenizer_name": "tokenizer", "train_file": "input_files",
    "validation_file": "validation_files", "vocab_size": "vocabulary_size",
    "warmup_ratio": "warmup_proportion",
    # Graphcore's applications
    "attention_heads": "heads", "auto_loss_scaling": "loss_scaling", "dropout_prob": "dropout",
    "embedding_serialization_factor": "embedding_serialisation",
    "gradient_clipping": "max_norm", "hf_model": "init_from", "max_positional_length":
    "max_positions", "inference_projection_serialization_factor": "inference_head_serialisation",
    "inference_replication_factor": "inference_data_parallel", "maximum": "learning_rate",
    "projection_serialization_factor":
    "head_serialisation", "recompute_checkpoint_every_layer": "recomputation",
    "replication_factor": "data_parallel", "rts": "replicated_tensor_sharding",
    "tensor_parallel": "tensor_parallel_1", "to_keep": "keep",
    # Megatron-LM
    "add_qkv_bias": "qkv_biases", "clip_grad": "max_norm", "data_path": "input_files",
    "hidden_dropout": "dropout", "kv_channels": "head_size", "lr_decay_style": "schedule",
    "lr_warmup_iters": "warmup_steps", "num_query_groups":
    "key_value_heads", "save_interval": "every", "seq_length": "sequence_length",
    "tensor_model_parallel_size": "tensor_parallel_1", "train_iters": "steps",
}  # fmt: skip
"""Names elsewhere: names here."""
OF_TRAINED = {"init_from": "checkpoint"}
"""Names here: those of programs that use what was trained."""
NO_EFFECT = "It would have no effect here: leave it out."
INSTEAD = {
    "available_memory_proportion": NO_EFFECT,
    "backend": "--device says where a run executes, and the launcher how processes meet.",
    "bf16": "Write --precision bfloat16.",
    "code_load": NO_EFFECT,
    "compile": "Programs are compiled always: leave it out.",
    "eval_only": "demo/evaluate.py measures a model that is trained: use it.",
    "extended_memory": "Rows wait on the host always, and in files with --memmap_dir.",
    "fp16": "Write --precision float16 --loss_scaling auto.",
    "io_tiles": NO_EFFECT,
    "lr_decay_iters": "Give --decay_steps, which do not count those of warm-up.",
    "matmul_proportion": NO_EFFECT,
    "n_samples": "--train_samples are the first ones alone; --steps or --epochs says how often.",
    "pipeline": "There are no stages of a pipeline; use --tensor_parallel_1 and --data_parallel.",
    "pipeline_model_parallel_size": "There are no stages of a pipeline; use --tensor_parallel_1.",
}
"""Names elsewhere of what is no single setting here: what to do."""


def hint_of(name: str, known: Collection[str]) -> str:
    """What to write in place of another program's name, where that is known; else nothing.

    Args:
        known: names of the settings that the program uses.
    """
    same = SAME.get(name, "")
    for each in (same, OF_TRAINED.get(same)):
        if each in known:
            return f"Did you mean '--{each}'?"
    return INSTEAD.get(name, "")
