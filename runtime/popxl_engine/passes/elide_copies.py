"""Which copies nothing can observe.

Values that share storage form a class. Those that *must* alias, by contract, are joined first:
results of alias forms, and of writes in place. A result that is independent by contract is a
*candidate* for a view where it has the numbers of something else: a ``copy``, an out-of-place
view, a load of a remote row. The copy is elided (the two classes are joined) unless one of these
rules keeps it:

- `source_changes`: the source's storage is written after the view was made, and the view is still
  read then;
- `view_changes`: the view is written, and the source's storage is still read then;
- `others_read`: inputs, constants and variables are read by the caller, by other calls, and in the
  next run;
- `slots_read`: the host still owns the slots of its streams;
- `members_read`: a collective's result is one tensor for all members of the group in this process;
- `views_written`: the result is written, and an alias form views it, which may need elements that
  lie next to each other;
- `operands_apart`: an operand shares storage with one that the same op writes (`separate_operands`
  inserts this copy);
- `outputs_apart`: what a body returns shares no storage with its inputs, with state, or with
  another output.

A remote buffer is a storage like others, except that a row may be changed early when its own store
follows:

- `own_row`: only a store of the changed value itself to the very row it was loaded from counts;
- `rows_between`: nobody may load from the buffer between the change and that store.

Tests take each rule away and must fail.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from popxl_engine.analysis.aliases import must_alias_edges
from popxl_engine.analysis.effects import NOTHING, effects_of_instr, synchronizes
from popxl_engine.analysis.union_find import UnionFind
from popxl_engine.analysis.value_numbers import ValueNumbers
from popxl_engine.ir import Block, Instr, Value, map_blocks
from popxl_engine.kernels.collectives import SHARED

END = 1 << 60
"""A read by someone outside the block: the caller, the next run."""

RULES = frozenset(
    {
        "source_changes",
        "view_changes",
        "others_read",
        "slots_read",
        "members_read",
        "views_written",
        "outputs_apart",
        "own_row",
        "rows_between",
    }
)


class Accesses:
    """The positions where values that share storage are read and written, in order."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        self.reads: list[int] = []
        self.writes: list[int] = []

    def join(self, other: "Accesses") -> None:
        """Take over what is done to another one."""
        self.reads = merge_sorted(self.reads, other.reads)
        self.writes = merge_sorted(self.writes, other.writes)


def merge_sorted(positions: list[int], more: list[int]) -> list[int]:
    """Two sorted lists as one; the longer one is used up."""
    few, many = sorted((positions, more), key=len)
    if len(few) * 8 > len(many):
        return sorted([*few, *many])
    for position in few:
        insort(many, position)
    return many


def elide_copies(program: Block, rules: frozenset[str] = RULES) -> Block:
    """Mark the copies of a program that must stay; all others become views.

    Args:
        rules: what keeps copies. Tests take one away.
    """
    return map_blocks(program, lambda block: _Elision(block, rules).run())


class _Elision:
    """Decides for one block whose bodies are done."""

    def __init__(self, block: Block, rules: frozenset[str]):
        self.block, self.rules = block, rules
        self.classes: UnionFind[Any] = UnionFind()
        """Classes of values, remote buffers and streams."""
        self.storage: defaultdict[Any, Accesses] = defaultdict(Accesses)
        """Accesses by what a class goes by."""
        self.rows: dict[Value, tuple[Any, Any]] = {}
        """Values that are a whole remote row: (buffer, key of the offset)."""
        self.same: dict[Value, Value] = {}
        """In-place results and copies: the value whose memory they are, element by element."""
        self.numbers = block.find(ValueNumbers)
        self._stores: dict[Any, list[int]] = {}
        """Positions of the stores to each remote buffer."""
        self.viewed: set[Value] = set()
        """Values that alias forms view, and that are written."""
        self.copied: set[Instr] = set()
        """Instructions whose result needs a copy."""
        self.views: set[Instr] = set()
        """Alias forms that must view."""

    def of(self, key: Any) -> Accesses:
        """The storage of a value or remote buffer."""
        return self.storage[self.classes.find(key)]

    def join(self, a: Any, b: Any) -> None:
        """Make two values share a class."""
        kept, taken = self.of(a), self.of(b)
        if kept is not taken:
            kept.join(taken)
            del self.storage[self.classes.find(b)]
            self.classes.join(a, b)

    def run(self) -> Block:
        """The block with every edge decided."""
        self._join_aliases()
        self._find_accesses()
        self._find_viewed()
        for position, instr in enumerate(self.block.instrs):
            self._decide(position, instr)
        instrs = [self._marked(instr) for instr in self.block.instrs]
        outputs, copies = self._separate_outputs()
        inputs = [(i, self.block.inputs[i]) for i in self.block.by_ref]
        written = frozenset(i for i, value in inputs if self.of(value).writes)
        viewed = frozenset(i for i, value in inputs if value in self.viewed)
        return self.block.with_instrs(
            [*instrs, *copies], outputs=outputs, written=written, viewed=viewed
        )

    def _marked(self, instr: Instr) -> Instr:
        needs_contiguous = not self.viewed.isdisjoint(instr.outputs)
        if not needs_contiguous and instr not in self.copied and instr not in self.views:
            return instr
        return replace(
            instr,
            needs_copy=instr.needs_copy or instr in self.copied,
            needs_contiguous=needs_contiguous,
            must_view=instr in self.views,
        )

    # Facts

    def _join_aliases(self) -> None:
        """Join what shares storage by contract."""
        for instr in self.block.instrs:
            for source, result in must_alias_edges(instr):
                self.join(source, result)
                if instr.kind == "op" and not (instr.definition and instr.definition.alias):
                    self.same[result] = self.identity(source)

    def _find_accesses(self) -> None:
        """Record where everything is read and written."""
        block = self.block
        for position, instr in enumerate(block.instrs):
            for value in instr.inputs():
                self.of(value).reads.append(position)
            for value in instr.written():
                self.of(value).writes.append(position)
            if instr.is_op("remote_store"):
                self._stores.setdefault(instr.arguments["remote_buffer"], []).append(position)
            effects = effects_of_instr(instr)
            if effects is not NOTHING:
                for buffer in effects.loaded_buffers:
                    self.of(buffer).reads.append(position)
                for buffer in effects.stored_buffers:
                    self.of(buffer).writes.append(position)
        for value in block.outputs:
            self.of(value).reads.append(len(block.instrs))
        for value in self._read_by_others():
            self.of(value).reads.append(END)

    def _read_by_others(self) -> Iterator[Any]:
        """What somebody outside the block reads at any time."""
        block, every = self.block, self.block.instrs
        if "others_read" in self.rules:
            yield from (*block.inputs, *block.constants.values(), *block.state.values())
            yield from {
                buffer for instr in every for buffer in effects_of_instr(instr).loaded_buffers
            }
        if "slots_read" in self.rules:
            yield from (
                instr.arguments["h2d_stream"] for instr in every if instr.is_op("host_load")
            )
        if "members_read" in self.rules:
            yield from (instr for instr in every if is_of_all_members(instr))

    def _find_viewed(self) -> None:
        """Find the alias forms whose storage is written later, and those of bodies, and every value
        of that storage.

        Ops that make such a value lay it out plainly, so that it can be viewed.
        """
        viewed = set()
        for position, instr in enumerate(self.block.instrs):
            if instr.definition is not None and instr.definition.alias:
                storage = self.of(instr.outputs[0])
                if storage.writes and storage.writes[-1] > position:
                    self.views.add(instr)
                    viewed.add(id(storage))
            for body, inputs in instr.calls():
                viewed.update(id(self.of(inputs[i])) for i in body.viewed)
        if viewed:
            made = (v for instr in self.block.instrs for v in instr.outputs)
            all_values = (*self.block.inputs, *made)
            self.viewed.update(v for v in all_values if id(self.of(v)) in viewed)

    def identity(self, value: Value) -> Value:
        """The first value whose memory this one is, element by element."""
        while value in self.same:
            value = self.same[value]
        return value

    # Decisions

    def _decide(self, position: int, instr: Instr) -> None:
        source = view_source(instr)
        if source is None:
            return
        if instr.kind == "copy" and instr.arguments["t"].host != instr.outputs[0].host:
            self.copied.add(instr)
            return
        self._note_row(instr, source)
        for result in instr.outputs:
            if self.of(source) is not self.of(result) and self._observable(
                position, source, result
            ):
                self.copied.add(instr)
        if instr not in self.copied and not instr.needs_copy:
            for result in instr.outputs:
                self.join(source, result)
                if instr.kind == "copy":
                    self.same[result] = self.identity(source)
        elif instr.kind == "copy" or instr.is_op("remote_load"):
            self.rows.pop(instr.outputs[0], None)

    def _note_row(self, instr: Instr, source: Any) -> None:
        """Remember which remote row a load, or a copy of one, is."""
        if instr.kind == "copy" and self.identity(source) in self.rows:
            self.rows[instr.outputs[0]] = self.rows[self.identity(source)]
        elif instr.is_op("remote_load"):
            self.rows[instr.outputs[0]] = (
                instr.arguments["remote_buffer"],
                self.numbers.key(instr.arguments["offset"]),
            )

    def _observable(self, position: int, source: Any, result: Value) -> bool:
        """Whether someone could tell a view from a copy."""
        old, new = self.of(source), self.of(result)
        if "views_written" in self.rules and result in self.viewed:
            return True
        through = self._written_through(new, result)
        if "source_changes" in self.rules and old.writes and new.reads:
            later = bisect_left(old.writes, position + 1)
            while later < len(old.writes) and old.writes[later] == through:
                later += 1
            if later < len(old.writes) and new.reads[-1] >= old.writes[later]:
                return True
        if "view_changes" not in self.rules or not new.writes:
            return False
        if through is not None and "rows_between" not in self.rules:
            return False
        read = bisect_left(old.reads, new.writes[0])
        return read < len(old.reads) and (through is None or old.reads[read] < through)

    def _written_through(self, new: Accesses, result: Value) -> int | None:
        """The position where a row that was loaded and changed is stored to its own place, after
        its last change. None if it is not.

        Then changing the row early is not seen by anyone: `_observable` refuses reads of the buffer
        in between.
        """
        row = self.rows.get(result)
        if row is None or not new.writes:
            return None
        buffer, offset = row
        stores = self._stores.get(buffer, [])
        for position in stores[bisect_left(stores, new.writes[-1] + 1) :]:
            arguments = self.block.instrs[position].arguments
            if "own_row" not in self.rules:
                return position
            if self.numbers.key(arguments["offset"]) == offset and self.identity(
                arguments["t"]
            ) is self.identity(result):
                return position
        return None

    def _separate_outputs(self) -> tuple[tuple[Value, ...], list[Instr]]:
        """Outputs of a body that are independent of its inputs, of state, and of each other; and
        the copies that make them so.
        """
        outputs, copies = list(self.block.outputs), []
        taken: set[int] = set()
        for i, value in enumerate(outputs if "outputs_apart" in self.rules else ()):
            storage = self.of(value)
            if storage.reads and storage.reads[-1] == END or id(storage) in taken:
                outputs[i] = replace(value, name=f"{value.name}_out{i}", sharding=None)
                copies.append(
                    Instr("copy", {"t": value}, (outputs[i],), host=value.host, needs_copy=True)
                )
            taken.add(id(storage))
        return tuple(outputs), copies


def is_of_all_members(instr: Instr) -> bool:
    """Whether an instruction's result is other replicas' result, too."""
    if instr.definition is None or instr.kind == "begin":
        return False
    return instr.definition.name in SHARED and synchronizes(instr)


def view_source(instr: Instr) -> Any:
    """What an instruction's result could be a view of: a value, a buffer, a stream, or what
    replicas share.

    The last goes by the instruction itself. None where there is nothing.
    """
    if is_of_all_members(instr):
        return instr
    if instr.kind == "copy":
        return instr.arguments["t"]
    definition = instr.definition
    if definition is None or definition.alias or instr.kind == "begin":
        return None
    if definition.name == "remote_load":
        return instr.arguments["remote_buffer"]
    if definition.name == "host_load":
        return instr.arguments["h2d_stream"]
    return instr.arguments[definition.views[0]] if definition.views else None
