"""What reading leaves out, or changes: counted, and told in one line for each kind."""

from dataclasses import dataclass, field
from pathlib import Path

from popxl_gpt.utils.errors import DataError
from popxl_gpt.utils.escaping import one_line
from popxl_gpt.utils.units import counted


@dataclass
class LeftOut:
    """Counts of what is left out. Documents may be read more than once; each thing counts once."""

    skips: bool = False
    """Whether damaged records and files are left out, in place of an error."""
    records: dict[tuple[str, str], str] = field(default_factory=dict)
    """What is wrong with each damaged record, by file and place."""
    files: dict[str, str] = field(default_factory=dict)
    """What is wrong with each file that is no text."""
    nulls: dict[str, int] = field(default_factory=dict)
    """Rows whose text is null, by file."""
    line_ends: dict[str, None] = field(default_factory=dict)
    """Files whose lines ended otherwise than in LF, which is what they have become."""
    choices: dict[str, int] = field(default_factory=dict)
    """Conversations with 'messages' and a prompt, or an answer, beside them, by file."""

    def record(self, path: Path, place: str, problem: Exception, expected: str) -> None:
        """Note a damaged record; DataError where those are not left out."""
        if not self.skips:
            raise DataError(f"{path}, {place}: {problem}; expected {expected}.") from problem
        # of 'line 3 at byte 40' the byte
        self.records[str(path), place.rpartition("at ")[2]] = str(problem)

    def __or__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(
            self.skips,
            self.records | other.records,
            self.files | other.files,
            self.nulls | other.nulls,
            self.line_ends | other.line_ends,
            self.choices | other.choices,
        )

    def counts(self) -> dict[str, int]:
        """Numbers for `dataset.json`, of what there is."""
        found = {
            "damaged": len(self.records),
            "damaged_files": len(self.files),
            "null_rows": sum(self.nulls.values()),
        }
        return {name: count for name, count in found.items() if count}

    def lines(self) -> list[str]:
        """What people are told."""
        told = []
        if self.records:
            (path, place), problem = next(iter(self.records.items()))
            told.append(
                f"{counted(len(self.records), 'damaged record')} left out, the first at {place} of "
                f"{path}: {problem}."
            )
        if self.files:
            problem = next(iter(self.files.values()))
            told.append(f"{counted(len(self.files), 'file')} left out, the first: {problem}")
        if self.nulls:
            rows = counted(sum(self.nulls.values()), "row")
            told.append(f"{rows} left out that {_first('null in place of text', self.nulls)}.")
        if self.line_ends:
            files = counted(len(self.line_ends), "file")
            told.append(
                f"Line ends are LF now in {files} that {_first('CR LF or CR', self.line_ends)}."
            )
        if self.choices:
            taken = counted(sum(self.choices.values()), "conversation")
            told.append(
                f"'messages' taken of {taken} that "
                f"{_first('prompt or answer beside them', self.choices)}."
            )
        return [one_line(line) for line in told]  # names of files may hold line breaks


def _first(had: str, files: "dict[str, int] | dict[str, None]") -> str:
    return f"had {had}, the first in {next(iter(files))}"
