"""Tests that try things at random, with another seed each time and more of them, and those of
outsiders, logging services and batch systems.
"""

import os
import subprocess
import sys
from collections.abc import Sequence

from tests.torture.application import ROOT, SECONDS, Workshop
from tests.torture.judge import Broken
from tests.torture.torture import Torture

MUTATIONS = 250
"""Mutations of a trial."""
CONFIGURATIONS = [
    f"tests/test_mutations.py::test_{what}_at_random_are_used_or_refused_in_words"
    for what in ("flags", "configuration_files")
]
FILES = [
    f"tests/test_mutations.py::test_{name}"
    for name in (
        "token_files_at_random_give_their_tokens_or_are_refused_in_words",
        "records_with_right_checksums_and_any_content_are_read_or_refused_in_words",
        "tokenizers_at_random_are_read_or_refused_in_words",
        "descriptions_with_right_checksums_and_any_content_are_read_or_refused_in_words",
        "tensor_files_with_any_content_are_read_or_refused_in_words",
        "folders_of_hugging_face_at_random_are_read_whole_or_refused_in_words",
        "metrics_at_random_are_read_line_by_line",
    )
]
TABLES = [
    "tests/test_mutations.py::test_tables_at_random_give_texts_of_their_bytes_or_are_refused_in_words"
]
TABLE_TRIALS = 40
"""Of which each has MUTATIONS: 10,000 together."""
STRANGERS = [
    f"runtime/tests/popdist/test_strangers.py::test_{name}"
    for name in (
        "strangers_at_every_port_of_a_run_neither_end_nor_change_it",
        "a_run_on_one_machine_listens_at_no_port_and_no_other_user_can_enter_its_folder",
        "garbage_is_neither_read_further_nor_answered",
        "a_thousand_silent_connections_keep_no_member_waiting_and_no_descriptor",
        "what_a_member_has_said_lets_nobody_else_in",
        "another_user_who_gets_into_the_folder_is_not_let_in",
        "a_folder_that_another_user_has_made_first_is_refused_in_words_and_poprun_takes_another",
    )
]
PLANTED = [
    "runtime/tests/popxl_addons/test_planted_memory.py",
    "tests/integration/execution/test_planted_links.py",
    "tests/integration/execution/test_state_folder.py",
    "tests/test_hostile_names.py",
]
"""What other users have put where a run reads and writes, and names that command a terminal."""
SERVICES = [
    f"tests/integration/execution/test_demo.py::test_{name}"
    for name in (
        "a_wandb_that_fails_stops_nothing",
        "a_wandb_that_hangs_delays_no_step",
        "wandb_has_all_of_a_run_also_of_one_that_goes_on",
    )
]

SLURM = [
    f"tests/integration/execution/test_slurm.py::test_{name}"
    for name in (
        "a_job_whose_time_ends_is_queued_again_and_goes_on_bitwise",
        "a_job_that_makes_room_saves_and_is_queued_again",
        "a_job_that_is_cancelled_saves_and_is_not_queued_again",
        "a_task_that_is_killed_ends_the_others_also_where_srun_does_not",
    )
]
MPIRUN = [
    f"tests/integration/execution/test_other_launchers.py::test_{name}"
    for name in ("a_launcher_starts_one_run_with_the_bits_of_one_process",)
]


def passes(test: str, seed: int) -> str:
    """Run a test with a seed. Returns what was done; raises Broken where it fails."""
    variables = {"MUTATIONS": str(MUTATIONS), "MUTATION_SEED": str(seed), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--tb=short", test]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True,
        timeout=2 * SECONDS, check=False,
    )  # fmt: skip
    name = test.rpartition("::")[2]
    if done.returncode != 0:
        why = [line for line in done.stdout.splitlines() if line.startswith(("E  ", "ERROR"))]
        raise Broken(f"{name}, seed {seed}: {' '.join(why[:4])[:600] or done.stdout[-300:]}")
    last = done.stdout.strip().splitlines()[-1].strip("= ")
    return f"{name}, seed {seed}: {last}"


def with_seeds(
    name: str, promise: str, tests: "Sequence[str]", cases: int | None = None
) -> Torture:
    """The tests in turn, each time with the case's number as their seed.

    Args:
        cases: how many there are; None: without end.
    """

    def trial(case: int, shop: Workshop) -> str:
        told = passes(tests[case % len(tests)], case)
        return f"{MUTATIONS} mutations: {told}"

    return Torture(name, promise, trial, None if cases is None else lambda shop: cases)


def each(name: str, promise: str, tests: "Sequence[str]") -> Torture:
    """Each test once."""

    def trial(case: int, shop: Workshop) -> str:
        return passes(tests[case], 1)

    return Torture(name, promise, trial, lambda shop: len(tests))


OF_TESTS = [
    with_seeds(
        "configurations",
        f"Flags and files at random, {MUTATIONS} a trial, are used or refused in words.",
        CONFIGURATIONS,
    ),
    with_seeds(
        "files",
        f"Records and checkpoints at random, {MUTATIONS} a trial, are read or refused in words.",
        FILES,
    ),
    with_seeds(
        "tables",
        f"Arrow and Parquet files at random, {MUTATIONS} a trial, are read or refused in words.",
        TABLES,
        TABLE_TRIALS,
    ),
    each("outsiders", "Outsiders neither end a run nor change it.", [*STRANGERS, *PLANTED]),
    each("services", "A wandb that is absent, slow or broken stops nothing.", SERVICES),
    each(
        "launchers", "Slurm's jobs save and go on; any launcher starts one run.", [*SLURM, *MPIRUN]
    ),
]
"""Kinds whose tests `make test` has."""
