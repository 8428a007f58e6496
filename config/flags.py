"""The words of a command line as flags, and the help that lists them."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from textwrap import fill
from types import MappingProxyType
from typing import Any

from popxl_gpt.config.leaves import Leaf, leaves, sections, shown
from popxl_gpt.config.other_programs import hint_of
from popxl_gpt.config.presets import preset_names
from popxl_gpt.config.schema import Config
from popxl_gpt.utils.errors import SHOWN, ConfigError
from popxl_gpt.utils.texts import did_you_mean

HELP_FLAGS = ("--help", "-h")


class Flags:
    """What the words of a command line give, and what is wrong with each.

    Attributes:
        config: what `--config` names; None without it.
        values: of the other flags, by the names of settings.
        problems: all of them.
        bad: names of the settings that those are about.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        program: str,
        records: Sequence[type],
        *,
        words: str | None = None,
        unused: Sequence[str] = (),
        has_presets: bool = False,
    ):
        """Read all words.

        Args:
            program: what the program is called and does, for `--help`.
            records: the dataclasses whose leaves are its flags, in the order of the help.
            words: the leaf that words without a flag before them go to.
            unused: sections and leaves that the program has no use for.
            has_presets: whether there is `--config`.
        """
        self.program, self.records, self.words = program, records, words
        self.has_presets = has_presets
        known = [leaf for record in reversed(records) for leaf in leaves(record)]
        self._flags = {leaf.name: leaf for leaf in known} | {leaf.path: leaf for leaf in known}
        self._unused = [leaf for leaf in known if {leaf.name, leaf.section} & {*unused}]
        self.config: str | None = None
        self.values: dict[str, Any] = {}
        self.problems: list[str] = []
        self.bad: set[str] = set()
        self._rest = list(arguments)
        self._asks_for_help = any(word in HELP_FLAGS for word in arguments)
        self._read()
        self._refuse_unused()

    @property
    def given(self) -> frozenset[str]:
        """Names of what the command line says itself, `config` among them, right or wrong."""
        config = [] if self.config is None else ["config"]
        return frozenset((*self.values, *self.bad, *config))

    def answer_help(
        self, default: str = "", defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Print the help and exit, if it is asked for.

        Args:
            default: preset that is taken without `--config`.
            defaults: leaves that the program sets differently from their defaults, by name.
        """
        if self._asks_for_help:
            print(self._help_text(default, defaults))
            sys.exit(0)

    def check(self, where: str = "configuration") -> None:
        """Raise ConfigError, which lists every problem, where there is one."""
        if self.problems:
            raise ConfigError(self.problems, where)

    def _read(self) -> None:
        while self._rest:
            word = self._rest.pop(0)
            if self.words is not None and not word.startswith("-"):
                self.values[self.words] = (*self.values.get(self.words, ()), word)
                continue
            if not word.startswith("--") or word == "--":
                self.problems.append(
                    f"{word}: got a word without a flag before it; expected --name value."
                )
                continue
            flag, has_value, value = word[2:].partition("=")
            flag = flag.replace("-", "_")
            if has_value:
                self._rest.insert(0, value)
            if flag == "config" and self.has_presets:
                try:
                    self.config = self._value("config")
                except ValueError as error:
                    self.problems.append(f"--{error}")
            elif flag in self._flags:
                self._read_leaf(self._flags[flag], attached=bool(has_value))
            elif (
                flag.removeprefix("no_") in self._flags
                and self._flags[flag.removeprefix("no_")].kind is bool
            ):
                self._read_no(self._flags[flag.removeprefix("no_")], word, attached=bool(has_value))
            else:
                self._refuse_flag(word, flag)

    def _read_leaf(self, leaf: Leaf, *, attached: bool) -> None:
        try:
            if leaf.is_list:
                self.values[leaf.name] = self._list(leaf, attached)
            elif leaf.kind is bool and not attached and not self._has_value:
                self.values[leaf.name] = True
            else:
                text = self._rest.pop(0) if attached else self._value(leaf.name)
                self.values[leaf.name] = leaf.parse(text)
        except ValueError as error:
            self.problems.append(f"--{error}")
            self.bad.add(leaf.name)

    def _read_no(self, leaf: Leaf, word: str, *, attached: bool) -> None:
        if attached:
            self.problems.append(f"{word}: got a value; expected none. Write --no-{leaf.name}.")
            self._rest.pop(0)
        self.values[leaf.name] = False

    def _refuse_flag(self, word: str, flag: str) -> None:
        name, hint = word.partition("=")[0][: 2 * SHOWN], ""
        if len(self.problems) < SHOWN:  # others are counted only
            leaf_names = dict.fromkeys(leaf.name for leaf in self._flags.values())
            known = {**leaf_names, **({"config": None} if self.has_presets else {})}
            unused = {leaf.name for leaf in self._unused}
            known = {name: None for name in known if name not in unused}
            near = did_you_mean(flag, known).replace("mean '", "mean '--")
            hint = hint_of(flag, known) or near
        self.problems.append(f"{name}: unknown flag. {hint or 'See --help for all of them.'}")
        self._take_values()

    @property
    def _has_value(self) -> bool:
        """Whether a word follows that is no flag."""
        return bool(self._rest) and not self._rest[0].startswith("--")

    def _value(self, name: str) -> str:
        if not self._has_value:
            raise ValueError(f"{name}: got no value; expected one. Write --{name} VALUE.")
        return self._rest.pop(0)

    def _take_values(self) -> list[str]:
        """The words up to the next flag."""
        found = []
        while self._has_value:
            found.append(self._rest.pop(0))
        return found

    def _list(self, leaf: Leaf, attached: bool) -> tuple[Any, ...]:
        """What the words up to the next flag stand for; `none` is the empty list."""
        found = [*([self._rest.pop(0)] if attached else []), *self._take_values()]
        if not found:
            what = "paths or patterns" if leaf.is_path else "texts"
            what = what if leaf.kind is str else "whole numbers"
            or_none = "" if leaf.is_free_text else ", or none"
            raise ValueError(f"{leaf.name}: got no value; expected {what}{or_none}.")
        if found == ["none"] and not leaf.is_free_text:
            return ()
        return tuple(found) if leaf.is_path else leaf.parse_list(found)  # paths are checked later

    def _refuse_unused(self) -> None:
        """Note as problems which of the flags that were given the program has no use for."""
        given, program = self.given, self.program.partition(":")[0]
        for leaf in self._unused:
            if leaf.name in given:
                self.problems.append(
                    f"--{leaf.name}: got a flag that {program} does not use; expected none. "
                    "Leave it out."
                )

    def _help_text(self, default: str, defaults: Mapping[str, Any]) -> str:
        """Presets, then every flag that is used with its values, default and meaning."""
        lines = [self.program]
        if default:
            presets = ", ".join(preset_names())
            lines += ["", "  --config NAME"]
            lines.append(
                _wrapped(
                    f"Preset, a run's folder, or a .yml file (default {default}). "
                    f"Presets: {presets}."
                )
            )
        sections_told = "Each flag may carry its section: --model.layers. "
        lines.append(
            f"\n{sections_told * (Config in self.records)}Booleans are switched off by --no-NAME."
        )
        for record in self.records:
            for section, doc in sections(record).items():
                lines += self._section_help(record, section, doc, defaults)
        if default:
            lines.append(
                "\nDefaults are those without a preset; what differs from one is printed when a "
                "run starts."
            )
        return "\n".join(lines)

    def _section_help(
        self, record: type, section: str, doc: str, defaults: Mapping[str, Any]
    ) -> list[str]:
        """The help of a section's flags; nothing where none is used."""
        own = [leaf for leaf in leaves(record) if leaf.section == section]
        used = [leaf for leaf in own if leaf not in self._unused]
        if not used:
            return []
        told = f"{section or 'run'}: {doc}" if record is Config else doc
        lines = ["\n" + fill(told, 110, break_on_hyphens=False)]
        # what comes without a flag comes first
        for leaf in sorted(used, key=lambda leaf: leaf.name != self.words):
            lines.append(f"  {_usage(leaf, is_word=leaf.name == self.words)}")
            value = defaults.get(leaf.name, leaf.default)
            told = "needed" if value is MISSING else f"default {shown(value)}"
            lines.append(_wrapped(f"{leaf.doc} ({leaf.expected}; {told})"))
        return lines


def _usage(leaf: Leaf, is_word: bool) -> str:
    if is_word:
        name = leaf.name.upper()
        return f"{name} [{name} ...]" if leaf.is_list else name
    if leaf.kind is bool:
        return f"--{leaf.name} | --no-{leaf.name}"
    word = "PATH" if leaf.is_path else "TEXT" if leaf.kind is str else "NUMBER"
    return f"--{leaf.name} {f'{word} [{word} ...]' if leaf.is_list else leaf.name.upper()}"


def _wrapped(text: str) -> str:
    return fill(text, width=110, initial_indent=" " * 6, subsequent_indent=" " * 6)
