"""What users may get wrong, as a table of (command, injected fault, exit code, words), run as real
processes: forks of one that has the programs imported (`tests.warm`), which their time includes.

One message, no traceback, nothing changed that was there before, and an answer at once where no
training was asked for.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.faults import (
    RECORDS,
    ROOT,
    Fault,
    below_zero,
    cut_off,
    damaged,
    emptied,
    flipped,
    folder_in_place_of,
    hashes,
    hear_signals,
    json_changed,
    json_entry,
    missing,
    nothing,
    obey_permissions,
    of_floats,
    pipe_in_place_of,
    read,
    read_only,
    records,
    renamed,
    replaced,
    run,
    tensors_changed,
    tokens,
    without_index,
    written,
)  # fmt: skip
from tests.integration.runs import run_job

pytestmark = pytest.mark.slow
SECONDS = 2.0
"""Limit for an answer, in processor time, as the machine may be busy with other things."""
PROGRAMS = (
    str(ROOT), str(ROOT / "runtime"),
    "popxl_gpt.demo.pretraining", "popxl_gpt.execution.pretraining", "popxl_gpt.data.prepare",
)  # fmt: skip
"""What answers a mistake before PyTorch is loaded, which takes longer than `SECONDS`."""

ALONE = "--data_parallel 1 --tensor_parallel_1 1 --tensor_parallel_2 1"
TRAIN = (
    f"{{train}} --config tiny {ALONE} --name run --sequence_length 8 --vocabulary_size 300 "
    "--steps 4"
)
TRAIN += " --checkpoint.every 2"
DATA = "--input_files tokens/train-00000.tfrecord"
RUN = f"{TRAIN} {DATA}"
RESUME = f"{RUN} --checkpoint.load auto --steps 6"
PREPARE = "{prepare} text text --sequence_length 8 --vocabulary_size 300 --workers 1"
LACKING = json.dumps({"version": "1.0", "added_tokens": [], "model": {
    "type": "Unigram", "unk_id": None, "byte_fallback": False, "vocab": [["?", -1.0], ["<|endoftext|>", -2.0]],
}})  # fmt: skip
"""A tokenizer.json of one character."""
NEWEST = "runs/run/checkpoints/step_00000004"
MANIFEST = f"{NEWEST}/checkpoint.json"
LOAD = f"{RUN} --checkpoint.load {NEWEST} --steps 6"
LATER = "runs/run/checkpoints/step_00000009"


@dataclass(frozen=True)
class Row:
    name: str
    command: str
    says: "tuple[str, ...]"
    fault: Fault = nothing
    code: int = 2
    largest_file: int | None = None
    """Bytes that a file may have: what a full disk is to a process."""
    asks_for_training: bool = False
    """Found while training; such a run may take its time, and leaves a run folder."""


SEVERAL = ("4 problems", "hidden_size: got 64", "global_batch_size: got 8", "max_positions = 4",
           "minimum_learning_rate: got 1")  # fmt: skip
ROWS = [
    # The command line and configuration files
    Row("unknown flag", f"{RUN} --layer 3", ("--layer: unknown flag", "Did you mean '--layers'?")),
    Row("word without a flag", RUN.replace("--config", "3 --config"), ("3: got a word without a flag",)),
    Row("flag without its value", f"{RUN} --layers", ("--layers: got no value", "--layers VALUE")),
    Row("wrong type", f"{RUN} --layers many --dropout x", ("--layers: got 'many'", "whole number", "--dropout: got")),
    Row("preset without a name", f"{RUN} --config=", ("--config: unknown preset ''",)),
    Row("number of samples below zero", f"{RUN} --samples -1", ("--samples: got -1; expected", "at least 0")),
    Row("out of range", f"{RUN} --dropout 1.5 --steps 0", ("dropout: got 1.5", "below 1", "steps: got 0")),
    Row("several impossible combinations", f"{RUN} --heads 5 --micro_batch_size 3 --max_positions 4 "
"--minimum_learning_rate 1", SEVERAL),
    Row("tensor parallelism that does not divide", f"{RUN} --tensor_parallel_1 3",
        ("heads: got 4", "tensor_parallel_1 = 3")),
    Row("widening that does not divide", f"{RUN} --widening 3",
        ("widening: got 3", "global_batch_size / (data_parallel * micro_batch_size) = 8. Use 2 or 4.")),
    Row("validation without files", f"{RUN} --validate_every 2", ("validation_files: got none", "--validate_every 0")),
    Row("unknown preset", f"{RUN} --config tny", ("--config: unknown preset 'tny'", "Did you mean 'tiny'?")),
    Row("no such configuration file", f"{RUN} --config my.yml", ("my.yml", "No such file")),
    Row("unknown key in a file", f"{RUN} --config my.yml",
        ("config.execution: unknown key 'micro_batch'. Did you mean 'micro_batch_size'?",),
        written("my.yml", "execution: {micro_batch: 2}")),
    Row("wrong type in a file", f"{RUN} --config my.yml",
        ("layers: got 'two'", "whole number"), written("my.yml", "model: {layers: two}")),
    Row("file that is no YAML", f"{RUN} --config my.yml", ("my.yml",), written("my.yml", "model: {layers: [")),
    Row("unknown option of preparation", f"{PREPARE} --output new --sequence 8", ("--sequence",)),
    Row("state larger than the machine's memory", "{train} --config gpt3_175B_pod256",
        ("memory: got", "for gpt3_175B_pod256: ", "for the state and", "--memmap_dir")),
    Row("memory for files without a folder", f"{RUN} --host_memory 1GiB",
        ("host_memory: got 1073741824 while memmap_dir is none", "Give --memmap_dir")),
    Row("memory in no unit", f"{RUN} --memmap_dir rows --host_memory 3GB", ("--host_memory: got '3GB'", "KiB, MiB")),
    Row("more memory than the machine has", f"{RUN} --memmap_dir rows --host_memory 1000TiB",
        ("host_memory: got 1000 TiB", "of this machine")),
    Row("unknown flag of the benchmark", "{bench} --layer 3", ("--layer: unknown flag", "Did you mean '--layers'?")),
    Row("nothing to measure", "{bench} --measured_runs 0", ("measured_runs", "got 0")),
    Row("data for the benchmark, which reads none", f"{{bench}} {DATA} --wandb --wandb_tags a --tensorboard",
        ("4 problems", "--input_files: got a flag that execution/pretraining.py does not use", "--wandb: got a flag",
         "--wandb_tags: got a flag", "--tensorboard: got a flag")),
    Row("benchmark larger than the memory", "{bench} --config gpt3_175B_pod256", ("memory: got", "--memmap_dir")),
    # Token files
    Row("no such file", f"{TRAIN} --input_files nothing*.tfrecord",
        ("nothing*.tfrecord", "matches no file", "data/prepare.py")),
    Row("folder without token files", f"{TRAIN} --input_files text", ("text", "matches no file")),
    Row("empty file", RUN, (RECORDS, "empty file"), damaged(RECORDS, emptied)),
    Row("device in place of token files", f"{TRAIN} --input_files /dev/zero",
        ("/dev/zero: got 'Not a plain file, but a device'",)),
    # before a search for what is trained, or how, which takes its time
    Row("empty file and a choice of what is trained", f"{{train}} --minutes 1 {DATA}",
        (RECORDS, "empty file"), damaged(RECORDS, emptied)),
    Row("empty file and a choice of how it is executed", f"{RUN} --auto", (RECORDS, "empty file"),
        damaged(RECORDS, emptied)),
    Row("no such checkpoint and a choice of how it is executed", f"{RUN} --auto --checkpoint.load nothing",
        ("nothing: got no checkpoint",)),
    Row("no such tokenizer and a choice of what is trained", f"{{train}} --minutes 1 {DATA} --tokenizer nothing",
        ("--tokenizer: got nothing", "No such file")),
    Row("file in place of a run folder and a choice of what is trained",
        f"{{train}} --minutes 1 {DATA} --run_folder text.txt",
        ("text.txt/1_minutes: got 'Not a directory' while writing",), written("text.txt", "")),
    Row("folder that takes no checkpoints and a choice of how it is executed",
        f"{RUN} --auto --checkpoint.save /proc/self", ("/proc/self: got ", "--checkpoint.save")),
    Row("file in place of a checkpoint", f"{RUN} --checkpoint.load /dev/zero",
        ("/dev/zero: got no checkpoint",)),
    Row("file that was cut off", RUN,
        (RECORDS, "was cut off", "bytes before the file ends"), damaged(RECORDS, cut_off)),
    Row("file that was cut off, without index", RUN, (RECORDS, "was cut off", "bytes before the file ends"),
        without_index(damaged(RECORDS, cut_off))),
    Row("flipped bit in a record", RUN, (RECORDS, "record 0: got data with checksum"), damaged(RECORDS, flipped(30))),
    Row("flipped bit in a length", RUN,
        (RECORDS, "record 0: got a length with checksum"), damaged(RECORDS, flipped(0))),
    Row("flipped bit in a later record", RUN,
        (RECORDS, "checksum", "prepare it again"), damaged(RECORDS, flipped(-30))),
    Row("text in place of records", RUN, (RECORDS, "no TFRecord file"),
        without_index(written(RECORDS, "once upon a time there was a file of text"))),
    Row("another feature", RUN, ("no feature 'input_ids'", "features found: 'input_idx'"),
        records([payload.replace(b"input_ids", b"input_idx") for payload in tokens(*range(9))])),
    Row("feature of another type", RUN, ("'input_ids' of type float", "int64"), records([of_floats()])),
    Row("record that is no Example", RUN, ("record 0", "no protobuf Example"), records([b"\xff" * 20])),
    Row("short sequences", RUN, ("got 5 tokens; expected at least 9", "sequence_length"), records(tokens(*range(5)))),
    Row("ids beyond the vocabulary", RUN,
        ("got token id 300; expected 0 to 299", "vocabulary_size"), records(tokens(*range(292, 301)))),
    Row("negative ids", RUN, ("got token id -1; expected 0 to 299",), records([below_zero()])),
    Row("prepared with a larger vocabulary", RUN.replace("300", "280"), ("dataset.json", "vocabulary_size 300", "280")),
    Row("damaged description of the data", RUN,
        ("dataset.json", "no valid description"), damaged("tokens/dataset.json", cut_off)),
    Row("damaged validation file", f"{RUN} --validate_every 2 --validation_files tokens/validation-*.tfrecord",
        ("validation-00000.tfrecord", "checksum"), damaged("tokens/validation-00000.tfrecord", flipped(30))),
    # Tokenizers
    Row("no such tokenizer", f"{RUN} --tokenizer no.json", ("--tokenizer: got no.json", "No such file")),
    Row("tokenizer that is none", f"{RUN} --tokenizer {RECORDS}",
        (f"--tokenizer: got {RECORDS}", "expected a tokenizer.json")),
    Row("tokenizer of a larger vocabulary", f"{RUN} --tokenizer other.json",
        ("--tokenizer: got other.json with 320 tokens", "300"),
        lambda folder: shutil.copy(folder / "larger/tokenizer.json", folder / "other.json")),
    Row("tokenizer of other data", f"{RUN.replace('300', '320')} --tokenizer larger/tokenizer.json",
        ("with 320 tokens; expected the data's 300", "beside the data")),
    Row("validation data of another tokenizer",
        f"{RUN.replace('300', '320')} --tokenizer tokens/tokenizer.json --validate_every 2 "
        "--validation_files larger/validation-00000.tfrecord",
        ("--tokenizer: got tokens/tokenizer.json, and data that larger/tokenizer.json made; expected both",)),
    # Checkpoints
    Row("no such checkpoint", f"{RUN} --checkpoint.load nowhere", ("nowhere: got no checkpoint", "step_<n>")),
    Row("checkpoint of another model", f"{RESUME} --hidden_size 32 --layers 3",
        ("hidden_size 64, not 32", "layers 2, not 3", "config.yml")),
    Row("checkpoint beyond the last step", f"{RUN} --checkpoint.load auto --steps 2",
        ("steps: got 2; expected at least 4",)),
    Row("checkpoint within a run of several steps",
        f"{RUN} --checkpoint.load auto --steps 6 --checkpoint.every 0 --device_iterations 3",
        ("device_iterations: got 3; expected a divisor of the 4 steps done", "Use 1, or load")),
    Row("description that was cut off", LOAD,
        ("checkpoint.json", "damaged", "older one"), damaged(MANIFEST, cut_off)),
    Row("description that says something else", LOAD,
        ("checkpoint.json", "damaged"), written(MANIFEST, '{"step": 4}')),
    Row("description that is no object", LOAD, ("checkpoint.json", "damaged"), written(MANIFEST, "[1, 2]")),
    Row("description with a wrong step", LOAD, ("checkpoint.json", "damaged"), json_changed(MANIFEST, step="four")),
    Row("description of another format", LOAD,
        ("format 99; expected 2 or older",), json_changed(MANIFEST, format=99)),
    Row("description with another step", LOAD,
        ("checkpoint.json", "SHA-256", "damaged"), replaced(MANIFEST, b'"step": 4', b'"step": 3')),
    Row("flipped bit in a seed", LOAD, ("checkpoint.json", "SHA-256", "damaged"),
        damaged(MANIFEST, lambda content: flipped(content.index(b'"seed": [') + 13)(content))),
    Row("description without its checksum", LOAD, ("without its checksum", "damaged"),
        lambda folder: (folder / MANIFEST).write_text(json.dumps(json.loads((folder / MANIFEST).read_text())))),
    Row("folder of another step", LOAD.replace("04 ", "05 "),
        ("step_00000005/checkpoint.json: got step 4; expected 5, as its folder's name",),
        renamed(NEWEST, "runs/run/checkpoints/step_00000005")),
    Row("step below zero", LOAD, ("got int -1 for step; expected a whole number",), json_entry(MANIFEST, "step", -1)),
    Row("seed beyond 32 bits", LOAD,
        (f"got int {2**32} for seed; expected", "damaged"), json_entry(MANIFEST, "seed", [1, 2**32])),
    Row("model that is a list", LOAD, ("got list [] for config.model", "damaged"),
        json_entry(MANIFEST, "config/model", [])),
    Row("description without execution", LOAD, ("got nothing for config.execution", "damaged"),
        json_entry(MANIFEST, "config/execution")),
    Row("checksum that is a number", LOAD, ("got int 7 for files.head.safetensors.sha256", "damaged"),
        json_entry(MANIFEST, "files/head.safetensors/sha256", 7)),
    Row("description nested without end", LOAD,
        ("inside each other without end", "damaged"), written(MANIFEST, "[" * 100_000)),
    Row("folder in place of a description", LOAD, ("checkpoint.json: got 'Is a directory'", "damaged"),
        folder_in_place_of(MANIFEST)),
    Row("folder in place of weights", LOAD, ("head.safetensors: got ", "Is a directory", "damaged"),
        folder_in_place_of(f"{NEWEST}/head.safetensors")),
    Row("file in place of a checkpoint", LOAD.replace(NEWEST, LATER), ("step_00000009: got no checkpoint",),
        written(LATER, "no folder")),
    Row("tensors that are unknown", LOAD, ("head.safetensors: got tensors that the run has not: more;", "damaged"),
        tensors_changed(f"{NEWEST}/head.safetensors", more=np.zeros(3, np.float32)), asks_for_training=True),
    Row("description without a layer", LOAD, ("checkpoint.json", "damaged"), json_changed(MANIFEST, files={})),
    Row("description without a seed", LOAD, ("checkpoint.json", "damaged"), json_changed(MANIFEST, seed="none")),
    Row("weights that were cut off", LOAD,
        ("decoder.1.safetensors", "bytes in weights.feed_forward_norm.weight; expected", "older one"),
        damaged(f"{NEWEST}/decoder.1.safetensors", cut_off)),
    Row("flipped bit in weights", LOAD,
        ("head.safetensors", "SHA-256", " in weights.norm.", "damaged"),
        damaged(f"{NEWEST}/head.safetensors", flipped(-9))),
    Row("missing weights", LOAD,
        ("embedding.safetensors", "No such file"), missing(f"{NEWEST}/embedding.safetensors")),
    Row("folder that holds a checkpoint's name only", LOAD.replace(NEWEST, LATER), ("step_00000009: got no checkpoint",),
        lambda folder: (folder / LATER).mkdir()),
    Row("only damaged checkpoints", RESUME,
        ("runs/run/checkpoints: got 2 checkpoints, all damaged (", "embedding.safetensors: got", "start afresh"),
        lambda folder: [missing(f"runs/run/checkpoints/step_0000000{step}/embedding.safetensors")(folder)
                        for step in (2, 4)]),
    Row("no best checkpoint", RESUME.replace("auto", "best"),
        ("--checkpoint.load: got best, and no checkpoint in runs/run/checkpoints has", "--validate_every"),
        lambda folder: shutil.rmtree(folder / NEWEST)),
    Row("validation loss that is a text", LOAD, ("got str 'low' for validation_loss; expected a number", "damaged"),
        json_entry(MANIFEST, "validation_loss", "low")),
    Row("schedule without its end", LOAD, ("got nothing for schedule.end; expected", "damaged"),
        json_entry(MANIFEST, "schedule", {"seconds": 60.0, "begin": 3, "rate": 0.1})),
    Row("schedule with a rate below zero", LOAD, ("got float -0.1 for schedule.rate; expected a number of 0", "damaged"),
        json_entry(MANIFEST, "schedule", {"seconds": 60.0, "begin": 3, "end": 9, "rate": -0.1})),
    Row("schedule of later steps", LOAD, ("got int 5 for schedule.begin; expected a whole number from 0 to 4", "damaged"),
        json_entry(MANIFEST, "schedule", {"seconds": 60.0, "begin": 5, "end": 9, "rate": 0.1})),
    Row("schedule that ended before", LOAD, ("got int 3 for schedule.end; expected a whole number from 4", "damaged"),
        json_entry(MANIFEST, "schedule", {"seconds": 60.0, "begin": 3, "end": 3, "rate": 0.1})),
    # What the system does not take, and what is something else
    Row("home of nobody", f"{RUN} --run_folder ~nosuchuser/x", ("--run_folder: got '~nosuchuser/x'", "no home folder")),
    Row("long path", f"{RUN} --checkpoint.load {'x/' * 3000}", ("--load: got ", "of 6000 bytes", "at most")),
    Row("long name", f"{RUN} --name {'x' * 300}", ("name: got ", "of 300 bytes; expected at most 200")),
    Row("text that is not UTF-8", f"{RUN} --name a\udcff", ("--name: got 'a\\udcff', which is not UTF-8",)),
    Row("more layers than any model", f"{RUN} --layers {10**30}", ("layers: got ", "expected")),
    Row("device in place of a folder", f"{RUN} --name new --checkpoint.save /dev/null",
        ("/dev/null: got 'File exists'; expected a folder for checkpoints", "--checkpoint.save")),
    Row("folder in place of a configuration", f"{RUN} --config text.yml", ("text.yml", "Is a directory"),
        folder_in_place_of("text.yml")),
    Row("folder in place of a tokenizer", f"{RUN} --tokenizer text",
        ("--tokenizer: got text, a folder without tokenizer.json; expected one. Check the path.",)),
    Row("folder in place of metrics", RESUME,
        ("runs/run: got 'metrics.jsonl is a folder'",), folder_in_place_of("runs/run/metrics.jsonl")),
    Row("folder in place of the run's configuration", RESUME,
        ("runs/run: got 'config.yml is a folder'",), folder_in_place_of("runs/run/config.yml")),
    Row("pipe in place of metrics", RESUME, ("runs/run: got 'metrics.jsonl is no plain file'",),
        pipe_in_place_of("runs/run/metrics.jsonl")),
    Row("folder in place of an index", RUN, ("train-00000.tfindex: got 'Is a directory'",),
        folder_in_place_of("tokens/train-00000.tfindex")),
    Row("description of data that lies about records", RUN, ("records; expected the 7 that dataset.json", RECORDS),
        lambda folder: (json_entry("tokens/dataset.json", "splits/train/records", 7)(folder),
                        json_entry("tokens/dataset.json", "splits/train/files", [
                            {"name": "train-00000.tfrecord", "bytes": (folder / RECORDS).stat().st_size, "records": 7}
                        ])(folder))),
    Row("description of data of another structure", RUN, ("dataset.json: got no valid description",),
        json_entry("tokens/dataset.json", "splits", [])),
    # Folders that take no files
    Row("run folder below a file", f"{RUN} --run_folder text/1.txt/runs",
        ("text/1.txt/runs", "Not a directory", "--run_folder")),
    Row("read-only folder of runs", f"{RUN} --name new",
        ("runs/new: got 'Permission denied'", "--run_folder"), read_only("runs")),
    Row("read-only run folder", RESUME, ("runs/run", "Permission denied"), read_only("runs/run")),
    Row("checkpoint folder of another run", f"{RUN} --name new --checkpoint.save runs/run/checkpoints",
        ("--checkpoint.save: got runs/run/checkpoints", "another run", "empty folder")),
    Row("read-only folder of checkpoints", RESUME,
        ("runs/run/checkpoints: got 'Permission denied'; expected a folder for checkpoints",),
        read_only("runs/run/checkpoints")),
    Row("preparation into a read-only folder", f"{PREPARE} --output closed/new",
        ("closed", "Permission denied", "--output"),
        lambda folder: ((folder / "closed").mkdir(), read_only("closed")(folder))),
    Row("preparation into a folder of something else", f"{PREPARE} --output text",
        ("text: got something not made by data/prepare.py",)),
    Row("preparation over other data", f"{PREPARE} --output larger", ("larger", "--overwrite")),
    Row("folder of a profile below a file", f"{RUN} --name new --profile --profile_folder text/1.txt/profile",
        ("--profile_folder: got 'Not a directory'", "text/1.txt/profile", "Check its permissions")),
    Row("read-only folder of a profile", "{bench} --config tiny --profile --profile_folder closed",
        ("--profile_folder: got 'Permission denied'", "closed"),
        lambda folder: ((folder / "closed").mkdir(), read_only("closed")(folder))),
    Row("folder of a profile without a profile", f"{RUN} --profile_folder profile",
        ("--profile_folder: got a value without --profile", "Add --profile")),
    # Full disks
    Row("full disk at the start", RESUME, ("runs/run: got 'File too large'", "space on the disk"), largest_file=500),
    Row("full disk at a checkpoint", RESUME,
        ("step_00000006: got", "while saving", "takes the checkpoint's", " bytes (", "Raise the limit of a file's size"),
        largest_file=40_000,
        asks_for_training=True),
    Row("full disk between checkpoints", f"{RUN} --name new --steps 40 --checkpoint.every 0",
        ("runs/new/metrics.jsonl: got 'File too large' while writing; expected space. Training goes on",
         "step_00000040: got", "metrics.jsonl: the last "), largest_file=6000, asks_for_training=True),
    Row("full disk at a profile", "{bench} --config tiny --profile --profile_folder profile --measured_runs 1",
        ("--profile_folder: got 'File too large'", "space on the disk"), largest_file=3000, asks_for_training=True),
    Row("full disk during preparation", f"{PREPARE} --output new", ("File too large", "--output"), largest_file=8000),
    # Text
    Row("no text", "{prepare} text nothing --output new", ("nothing",)),
    Row("too little text", "{prepare} text text/1.txt --output new --vocabulary_size 300 --workers 1",
        ("validation: got", "expected at least 1025")),
    Row("vocabulary smaller than bytes", PREPARE.replace("300", "100") + " --output new",
        ("vocabulary_size: got 100; expected at least 257",)),
    Row("tokenizer that lacks what the text has", "{prepare} text text --output new --workers 1 --tokenizer bad.json",
        ("bad.json: got 'Encountered an unknown token but `unk_id` is missing' instead of tokens; expected",),
        written("bad.json", LACKING)),
    Row("checking a damaged file", "{prepare} check " + RECORDS, (RECORDS, "checksum"), damaged(RECORDS, flipped(-30))),
    # The environment
    Row("half of a launcher's variables", f"RANK=0 {RUN}", ("popdist: got RANK without WORLD_SIZE", "or none. Start")),
    Row("half of a launcher's variables at the benchmark", "WORLD_SIZE=2 {bench}",
        ("popdist: got WORLD_SIZE without RANK", "or none. Start")),
    Row("launcher's variables that are no numbers", f"RANK=one WORLD_SIZE=2 {RUN}",
        ("RANK: got 'one'", "whole number")),
    Row("launcher's variables out of range", f"RANK=2 WORLD_SIZE=2 {RUN}", ("RANK=2 of WORLD_SIZE=2; expected 0",)),
    Row("launcher's variables of another number of replicas", f"RANK=0 WORLD_SIZE=1 POPDIST_NUM_TOTAL_REPLICAS=3 {RUN}",
        ("replicas: got 3 from the launcher; expected",)),
    Row("replicas that processes cannot share", f"RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 {RUN} --data_parallel 1",
        ("replicas: got 2 from the launcher; expected", "with torchrun set POPDIST_NUM_TOTAL_REPLICAS=1")),
    Row("unknown log level", f"MODEL_LOG_LEVEL=loud {RUN}", ("MODEL_LOG_LEVEL: got 'LOUD'", "unset it")),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with text, two preparations of it and a finished run. Its name has a space."""
    folder = tmp_path_factory.mktemp("made") / "a folder"
    (folder / "text").mkdir(parents=True)
    for number in range(12):
        words = (
            "the cat sat on a mat and saw seven more cats run past over there before they slept "
            "again "
        ).split()
        text = "".join(f"{words[(number + i) % len(words)]} {i * number}\n" for i in range(60))
        (folder / f"text/{number}.txt").write_text(text, encoding="utf-8")
    for command in (
        f"{PREPARE} --output tokens",
        f"{PREPARE.replace('300', '320')} --output larger",
        (
            f"{RUN} --validation_files tokens/validation-*.tfrecord --tokenizer "
            "tokens/tokenizer.json --validate_every 4"
        ),
    ):
        done, _ = run(folder, command, python=warm.python(before=obey_permissions))
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def copy(made, tmp_path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "a copy"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_mistake_is_told_in_one_message_and_changes_nothing(row, copy):
    row.fault(copy)
    before = hashes(copy)
    packages = warm.PACKAGES if row.asks_for_training else PROGRAMS
    python = warm.python(packages, before=obey_permissions)
    done, seconds = run(copy, row.command, row.largest_file, python)
    assert done.returncode == row.code, done.stdout + done.stderr
    assert (
        "Traceback" not in done.stderr and len(re.findall("^.*?error: ", done.stderr, re.M)) == 1
    ), done.stderr
    for words in row.says:
        assert words in done.stderr, done.stderr
    after = hashes(copy)
    if row.asks_for_training:
        kept = [
            name for name in before if not name.startswith("runs/run/") or "checkpoints" in name
        ]
        assert {name: after.get(name) for name in kept} == {name: before[name] for name in kept}
        assert hashes(copy, "runs/run/checkpoints").keys() <= before.keys()
    else:
        assert after == before
        assert seconds < SECONDS, f"{seconds:.1f} s of processor time"


def test_programs_that_answer_mistakes_have_loaded_no_torch_yet(copy):
    words = [warm.python(PROGRAMS), "-c", "import sys; print('torch' in sys.modules)"]
    done = subprocess.run(words, env={**os.environ, **warm.ONE_THREAD}, capture_output=True)
    assert done.stdout == b"False\n", done.stderr


def run_here(folder, command, monkeypatch):
    """A training run that has no reason to fail, in this process."""
    monkeypatch.chdir(folder)
    run_job(*read(command)[0][2:])


def test_auto_starts_afresh_where_there_is_no_checkpoint(copy, monkeypatch):
    shutil.rmtree(copy / "runs")
    run_here(copy, f"{RUN} --checkpoint.load auto --steps 2", monkeypatch)
    assert (copy / "runs/run/checkpoints/step_00000002/checkpoint.json").exists()


def test_a_second_run_of_a_name_takes_a_folder_of_its_own(copy, monkeypatch, capsys):
    before = hashes(copy, "runs/run")
    run_here(copy, f"{RUN} --steps 2", monkeypatch)
    assert "run folder runs/run-2" in capsys.readouterr().out
    assert hashes(copy, "runs/run") == before
    assert (copy / "runs/run-2/checkpoints/step_00000002/checkpoint.json").exists()


CANNOT_START = {
    "too little memory": ("--device_memory 1KiB", "device memory: got 1024 bytes"),
    "share of a processor": (
        "--device_memory 50%",
        "device memory: got a share of 0.5 on a processor; expected bytes",
    ),
    "device that is not there": ("--device cuda:99", "--device: got 'cuda:99'"),
    "folder below a file": (
        "--memmap_dir text/1.txt/rows --host_memory 1MiB",
        "text/1.txt/rows: got 'Not a directory'",
    ),
}
"""Found once the run has its folder."""


GO_ON, BEGIN = RESUME, f"{RUN} --name new"
BEGIN_IN_NEW_FOLDERS = f"{RUN} --run_folder new/runs --checkpoint.save saved"
STARTS = [
    *(
        pytest.param(problem, BEGIN_IN_NEW_FOLDERS, id=f"begin in new folders, {problem}")
        for problem in CANNOT_START
    ),
    # What becomes of the folder does not depend on what the problem was: one of the device and one
    # of the files.
    *(
        pytest.param(problem, command, id=f"{name}, {problem}")
        for problem in ("too little memory", "folder below a file")
        for name, command in (("go on", GO_ON), ("begin", BEGIN))
    ),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("problem, command", STARTS)
def test_a_run_that_cannot_start_leaves_nothing_behind_and_all_that_it_would_continue(
    problem, command, copy
):
    flag, says = CANNOT_START[problem]
    before = hashes(copy)
    python = warm.python(before=obey_permissions)
    done, _ = run(copy, f"{command} {flag}", python=python)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert hashes(copy) == before


def start(
    folder: Path, command: str, python: "str | None" = None, **variables: str
) -> subprocess.Popen:
    words, environment = read(command, python or warm.python())
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_signals,
    )


def wait_until(process: subprocess.Popen, is_so: "Callable[[], bool]") -> None:
    """A process that ends before, or takes too long, is ended, and the test fails with its words."""
    until = time.monotonic() + 120
    while not is_so():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise AssertionError(process.communicate(timeout=60))
        time.sleep(0.005)


def test_two_runs_do_not_write_to_one_folder_at_once(copy):
    first = start(copy, f"{RESUME} --steps 100000")
    try:
        wait_until(first, (copy / "runs/run/checkpoints/step_00000006").exists)
        works_at = copy / "runs/run/.config.yml.123"
        works_at.touch()
        python = warm.python(before=obey_permissions)
        second, _ = run(copy, f"{RESUME} --steps 100000", python=python)
        assert second.returncode == 2, second.stdout
        assert "runs/run: got a folder that another run is writing to" in second.stderr
        assert works_at.exists()
        assert "Traceback" not in second.stderr
    finally:
        first.send_signal(signal.SIGINT)
        output, errors = first.communicate(timeout=60)
    assert first.returncode == 130, errors


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_run_that_is_told_to_stop_saves_and_can_go_on(number, code, copy, monkeypatch, capsys):
    process = start(copy, f"{RUN} --name stopped --steps 100000 --checkpoint.every 0")
    metrics = copy / "runs/stopped/metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors and "stopping after this step" in errors
    (saved,) = (copy / "runs/stopped/checkpoints").iterdir()
    step = int(saved.name.removeprefix("step_"))
    assert f"After step {step}:" in output
    run_here(copy, f"{RUN} --name stopped --steps {step + 2} --checkpoint.load auto", monkeypatch)
    assert f"continuing after step {step}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_a_signal_before_training_leaves_no_folder(number, code, copy, tmp_path):
    before = hashes(copy)
    process = start(copy, f"{RUN} --name stopped --layers 200")  # which takes seconds to build
    wait_until(process, (copy / "runs/stopped/checkpoints").exists)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert hashes(copy) == before


@pytest.mark.parametrize(
    "command", ["{train} --config tiny", "{bench} --config tiny", f"{PREPARE} --output new"]
)
def test_ctrl_c_while_modules_load_ends_without_a_traceback(command, copy, tmp_path):
    (tmp_path / "numpy.py").write_text(
        "import time\nprint('loading', flush=True)\ntime.sleep(60)\n"
    )
    process = start(copy, command, sys.executable, PYTHONPATH=str(tmp_path))
    assert process.stdout.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and errors == ""


def test_ctrl_c_while_the_interpreter_ends_ends_it_without_a_traceback(tmp_path):
    (tmp_path / "program.py").write_text(
        "import atexit, os, signal\n"
        "def run(arguments):\n"
        "    atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "    return 0\n"
    )
    words = "from popxl_gpt.utils.programs import start; start('program', list)"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "runtime", tmp_path))),
    }
    done = subprocess.run(
        [sys.executable, "-c", words], env=environment, capture_output=True, text=True, preexec_fn=hear_signals
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_ctrl_c_while_preparing_leaves_what_the_same_command_goes_on_with_and_no_more(copy):
    (copy / "text/long.txt").write_text(
        "a text that is not read before the signal comes\n" * 100_000
    )
    before = hashes(copy)
    process = start(copy, f"{PREPARE.replace('300', '301')} --output new")
    while not any(copy.glob(".new.partial-*")):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and "the same command goes on" in errors
    (partial,) = copy.glob(".new.partial-*")
    shutil.rmtree(partial)
    assert hashes(copy) == before


@pytest.mark.parametrize(
    "command", ["{train} --help", "{train} --config tiny --plan"], ids=["help", "plan"]
)
def test_a_reader_that_goes_away_ends_the_output_quietly(command, copy):
    process = start(copy, command)
    process.stdout.close()
    with process.stderr as errors:
        assert process.wait(timeout=60) == 141 and errors.read() == ""


def test_help_that_a_full_disk_does_not_take_ends_in_words(copy):
    words, environment = read("{train} --help")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words, cwd=copy, env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "error: output: got 'No space left on device'; expected space to write. Free some."
    )
    assert "Traceback" not in done.stderr


def test_a_name_of_any_characters_is_drawn_and_written(copy, monkeypatch):
    run_here(copy, f"{RUN.replace('--name run', '')} --name a$b^{{_c --steps 2", monkeypatch)
    assert "<title>a$b^{_c</title>" in (copy / "runs/a$b^{_c/report.html").read_text()


@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-"], ids=["no stdout", "no stream at all"])
def test_a_run_without_anybody_to_listen_trains_as_any_other(streams, copy):
    words, environment = read(f"{RUN} --name new")
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {streams}', "bash", *words],
        cwd=copy,
        env=environment,
        timeout=60,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    assert done.stderr.count("stdout: got 'a closed one'; expected an output") == (
        "2>" not in streams
    )
    both = [
        (copy / f"runs/{name}/metrics.jsonl").read_text().splitlines() for name in ("run", "new")
    ]
    assert [json.loads(line)["loss"] for line in both[0]] == [
        json.loads(line)["loss"] for line in both[1]
    ]


def test_an_encoding_without_a_character_gets_it_escaped(copy):
    done, _ = run(
        copy, f"PYTHONIOENCODING=ascii {RUN.replace('--name run', '')} --name \u00e4 --steps 2"
    )
    assert done.returncode == 0, done.stderr
    assert "run folder runs/\\xe4" in done.stdout and (copy / "runs/\u00e4/metrics.jsonl").exists()


def test_a_token_file_that_shrinks_while_it_is_used_ends_the_run_in_words(copy):
    process = start(copy, f"{RUN} --name shrinks --steps 100000 --checkpoint.every 0")
    wait_until(process, (copy / "runs/shrinks/metrics.jsonl").exists)
    os.truncate(copy / RECORDS, 100)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and "Traceback" not in errors, errors
    assert (
        f"{RECORDS}: got 100 bytes; expected the" in errors
        and "Another program changed the file" in errors
    )


def test_a_file_of_remote_memory_that_shrinks_while_it_is_used_ends_the_run_in_words(copy):
    process = start(
        copy, f"{RUN} --name shrinks --steps 100000 --checkpoint.every 0 --memmap_dir rows"
    )
    wait_until(process, (copy / "runs/shrinks/metrics.jsonl").exists)
    for file in (copy / "rows/training").glob("weights.*.npy"):
        os.truncate(file, 0)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 74, errors
    assert "got 0 bytes; expected the" in errors and "cut the file off while it was used" in errors


def thinned(lines: "list[str]") -> str:
    return "".join([lines[0], *lines[2:]])


def broken(lines: "list[str]") -> str:
    return "".join(
        [lines[0], lines[1][:20] + "\udcff" + lines[1][21:], '{"step": "3"}\n', *lines[3:]]
    )


LOST = {
    "all": (lambda lines: "", "got 0 lines up to step 4 and none of step 4; expected the 4"),
    "a line": (thinned, "got 3 lines up to step 4 and none of step 2; expected the 4"),
    "a byte and a structure": (
        broken,
        "got 2 lines up to step 4 and none of step 3; expected the 4",
    ),
    "the last line": (
        lambda lines: "".join(lines[:3]),
        "got 3 lines up to step 4 and none of step 4; expected the 4",
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("lost", LOST)
def test_metrics_that_were_lost_are_told_of_and_the_run_goes_on(lost, copy, monkeypatch, capfd):
    change, says = LOST[lost]
    path = copy / "runs/run/metrics.jsonl"
    path.write_text(
        change(path.read_text().splitlines(keepends=True)),
        encoding="utf-8",
        errors="surrogateescape",
    )
    run_here(copy, RESUME, monkeypatch)
    assert f"runs/run/metrics.jsonl: {says} of when the run was saved" in capfd.readouterr().err
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()][-2:] == [5, 6]
    assert (
        json.loads((copy / "runs/run/checkpoints/step_00000006/checkpoint.json").read_text())[
            "metrics"
        ]
        >= 2
    )


def test_metrics_that_are_whole_are_not_told_of(copy, monkeypatch, capfd):
    run_here(copy, RESUME, monkeypatch)
    assert "metrics.jsonl" not in capfd.readouterr().err
