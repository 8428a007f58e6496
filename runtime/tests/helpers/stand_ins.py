"""Programs that stand in for a compiler."""

from pathlib import Path

READING = """
for word; do
  [ "$word" = "$REFUSED" ] && exit 1
  [ "$before" = -o ] && to=$word
  before=$word
done
"""


def compiler(folder: Path, rest: str) -> list[str]:
    """The command of a compiler that refuses the flag that REFUSED names, and else does the rest: a
    shell script, to which $to is the file to write.
    """
    script = folder / "my compiler"
    script.write_text(READING + rest)
    return ["sh", str(script)]
