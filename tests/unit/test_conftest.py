"""What the end of a run of the tests says."""

from types import SimpleNamespace

import conftest


class Terminal:
    """What `pytest_terminal_summary` asks of pytest's, with these reports of skipped tests."""

    def __init__(self, skipped):
        self.stats = {"skipped": skipped}
        self.lines = []

    def getreports(self, name):
        return self.stats.get(name, [])

    def write_line(self, line):
        self.lines.append(line)

    def write_sep(self, _, title):
        self.lines.append(title)


def test_skips_are_counted_by_their_reasons():
    reasons = ["only root", "no compiler", "only root"]
    reports = [SimpleNamespace(longrepr=("a.py", 3, f"Skipped: {why}")) for why in reasons]
    terminal = Terminal(reports)
    conftest.pytest_terminal_summary(terminal)
    assert terminal.lines == ["3 skipped", "     2 only root", "     1 no compiler"]
