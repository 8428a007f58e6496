"""A step of a BERT that is written for PopXL, the runtime's example, beside Hugging Face's."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness import ROOT
from benchmarks.own_cases import SPEED, Case, clocked

SIZES = {
    **{"layers": 4, "hidden_size": 256, "heads": 4, "sequence_length": 64},
    **{"micro_batch_size": 16, "vocabulary_size": 200},
}


def ways(*_: object) -> tuple[Callable[[], Any], Callable[[], float]]:
    """Steps on the same masked words, in float32, with AdamW: ours, and Hugging Face's."""
    import torch  # not at the top: `--help` is answered at once
    from transformers import BertConfig, BertForMaskedLM

    sys.path.append(str(ROOT / "runtime" / "examples"))
    import bert_encoder as ours

    config = ours.BertConfig(**SIZES)
    rng = np.random.default_rng(0)
    batch = ours.masked(rng, ours.texts(rng, config))
    session = ours.training_session(ours.MaskedWords(config), config)
    session.__enter__()  # the process ends with the benchmark

    hidden = config.hidden_size
    theirs = BertForMaskedLM(
        BertConfig(
            vocab_size=config.vocabulary_size, hidden_size=hidden, intermediate_size=4 * hidden,
            num_hidden_layers=config.layers, num_attention_heads=config.heads,
            max_position_embeddings=config.sequence_length, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    rate, decay = config.learning_rate, config.weight_decay
    adamw = torch.optim.AdamW(theirs.parameters(), lr=rate, weight_decay=decay, fused=True)
    ids, parts, labels = (torch.from_numpy(batch[n]).long() for n in ("ids", "parts", "labels"))
    given = {"input_ids": ids, "token_type_ids": parts, "attention_mask": (ids != ours.PAD).long()}
    given["labels"] = labels.masked_fill(labels == ours.PAD, -100)

    def plainly() -> float:
        adamw.zero_grad()
        loss = theirs(**given).loss
        loss.backward()
        adamw.step()
        return loss.item()

    return partial(ours.train, session, batch), plainly


CASES = (
    Case(
        name="bert, 4 layers of 256, 16 x 64 words", ready=ways, rounds=9, warmup=2,
        timed=lambda of: clocked(of[0]), beside=lambda of: clocked(of[1]),
        compared=SPEED, bar=(1.0, np.inf),
    ),
)  # fmt: skip
