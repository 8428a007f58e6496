"""Which copies nothing can observe.

Values that share storage form a class: alias forms and in-place writes join classes by contract. A
*soft* edge is an
instruction whose result is independent by contract but could be a view: a ``copy``, an out-of-place
    view, a load of a remote
row. It is removed (the two classes are joined) unless one of these rules keeps it:

- `source_changes`: the source's storage is written after the view was made, and the view is still
  read then;
- `view_changes`: the view is written, and the source's storage is still read then;
- `others_read`: inputs, constants and variables are read by the caller, by other calls, and in the
  next run;
- `slots_read`: the host still owns the slots of its streams;
- `members_read`: a collective's result is one tensor for all members of the group in this process;
- `views_written`: the result is written, and an alias form views it, which may need elements that
  lie next to each
other;
- `operands_apart`: an operand shares storage with one that the same op writes (`optimise` inserts
  this copy);
- `outputs_apart`: what a body returns shares no storage with its inputs, with state, or with
  another output.

A remote buffer is a storage like others, except that a row may be changed early when its own store
follows:

- `own_row`: only a store of the changed value itself to the very row it was loaded from counts;
- `rows_between`: nobody may load from the buffer between the change and that store.

Tests take each rule away and must fail.
"""

from bisect import bisect_left, insort
from typing import Any, Dict, FrozenSet, Iterable, Iterator, List, Optional, Set, Tuple

from popxl_engine.blocks import Block, Instr, Value, sharing
from popxl_engine.kernels.collectives import SHARED
from popxl_engine.summaries import NOTHING, Summaries, meets

END = 1 << 60
"""A read by someone outside the block: the caller, the next run."""

ALL_RULES = frozenset(
    {
        "source_changes",
        "view_changes",
        "others_read",
        "slots_read",
        "members_read",
        "views_written",
        "operands_apart",
        "outputs_apart",
        "own_row",
        "rows_between",
        "views_back",
        "views_again",
    }
)
"""Those of `copied_views`, which keeps views that are copies equal to what they view, among
them.
"""


class Storage:
    """A class of values that share storage: where it is read and written, in order."""

    __slots__ = ("members", "reads", "writes")

    def __init__(self) -> None:
        self.members: List[Any] = []
        self.reads: List[int] = []
        self.writes: List[int] = []

    def join(self, other: "Storage") -> None:
        """Take over another class."""
        self.members += other.members
        self.reads = merged(self.reads, other.reads)
        self.writes = merged(self.writes, other.writes)


def merged(positions: List[int], more: List[int]) -> List[int]:
    """Two sorted lists as one; the longer one is used up."""
    few, many = sorted((positions, more), key=len)
    if len(few) * 8 > len(many):
        return sorted([*few, *many])
    for position in few:
        insort(many, position)
    return many


class Aliasing:
    """Analyses one block whose bodies are already done, and marks the copies that must stay.

    Args:
        summaries: of what the block runs.
    """

    def __init__(self, block: Block, rules: FrozenSet[str], summaries: Summaries):
        self.block, self.rules, self.summaries = block, rules, summaries
        self.storage: Dict[Any, Storage] = {}
        self.rows: Dict[Value, Tuple[Any, Any]] = {}
        """Values that are a whole remote row: (buffer, number of the offset)."""
        self.same: Dict[Value, Value] = {}
        """In-place results and copies: the value whose memory they are, element by element."""
        self.numbers: Dict[Any, Any] = {}
        self._stores: Dict[Any, List[int]] = {}
        """Positions of the stores to each remote buffer."""
        self.viewed: Set[Value] = set()
        """Values that alias forms view, and that are written."""

    def of(self, key: Any) -> Storage:
        """The class of a value or remote buffer."""
        if key not in self.storage:
            fresh = self.storage[key] = Storage()
            fresh.members.append(key)
        return self.storage[key]

    def join(self, a: Any, b: Any) -> None:
        """Make two values share a class."""
        large, small = self.of(a), self.of(b)
        if large is small:
            return
        if len(large.members) < len(small.members):
            large, small = small, large
        large.join(small)
        for member in small.members:
            self.storage[member] = large

    def run(self) -> None:
        """Decide every soft edge."""
        self._hard()
        self._find_viewed()
        self._number()
        for position, instr in enumerate(self.block.instrs):
            self._decide(position, instr)
        self._separate_outputs()

    # Facts

    def _hard(self) -> None:
        """Join by contract; record where everything is read and written."""
        block = self.block
        for instr in block.instrs:
            for source, result in hard_edges(instr):
                self.join(source, result)
                if instr.kind == "op" and not (instr.definition and instr.definition.alias):
                    self.same[result] = self.identity(source)
        for position, instr in enumerate(block.instrs):
            for value in instr.inputs():
                self.of(value).reads.append(position)
            for value in instr.written():
                self.of(value).writes.append(position)
            if instr.is_op("remote_store"):
                self._stores.setdefault(instr.arguments["remote_buffer"], []).append(position)
            summary = self.summaries.of_instr(instr)
            if summary is not NOTHING:
                for buffer in summary.loads:
                    self.of(buffer).reads.append(position)
                for buffer in summary.stores:
                    self.of(buffer).writes.append(position)
        for value in block.outputs:
            self.of(value).reads.append(len(block.instrs))
        for value in self._read_by_others():
            self.of(value).reads.append(END)
        for i in block.by_ref:
            if self.of(block.inputs[i]).writes:
                block.written.add(i)

    def _read_by_others(self) -> Iterator[Any]:
        """What somebody outside the block reads at any time."""
        block, every = self.block, self.block.instrs
        if "others_read" in self.rules:
            yield from (*block.inputs, *block.constants.values(), *block.state.values())
            yield from {
                buffer for instr in every for buffer in self.summaries.of_instr(instr).loads
            }
        if "slots_read" in self.rules:
            yield from (
                instr.arguments["h2d_stream"] for instr in every if instr.is_op("host_load")
            )
        if "members_read" in self.rules:
            yield from (instr for instr in every if is_shared(instr))

    def _find_viewed(self) -> None:
        """Mark the alias forms whose storage is written later, and note every value of that
        storage.

        Ops that make such a value lay it out plainly, so that it can be viewed.
        """
        viewed = set()
        for position, instr in enumerate(self.block.instrs):
            if instr.definition is not None and instr.definition.alias:
                storage = self.of(instr.outputs[0])
                instr.shared = bool(storage.writes) and storage.writes[-1] > position
                if instr.shared:
                    viewed.add(id(storage))
        for instr in self.block.instrs:
            found = {v for v in instr.outputs if id(self.of(v)) in viewed}
            self.viewed |= found
            instr.contiguous = bool(found)

    def identity(self, value: Value) -> Value:
        """The first value whose memory this one is, element by element."""
        while value in self.same:
            value = self.same[value]
        return value

    def _number(self) -> None:
        """Equal numbers for equal host scalars, as far as they are never written."""
        known: Dict[Any, Tuple[str, int]] = {}

        def number(key: Any) -> Tuple[str, int]:
            return known.setdefault(key, ("number", len(known)))

        for constant, value in self.block.constants.items():
            self.numbers[value] = number(
                ("constant", constant.host_value.tobytes(), str(constant.dtype))
            )
        for instr in self.block.instrs:
            if instr.kind == "copy":
                self.numbers[instr.outputs[0]] = self.number(instr.arguments["t"])
            elif instr.kind == "op" and instr.host and not instr.written():
                assert instr.definition is not None
                key = tuple((n, self._argument_number(a)) for n, a in instr.arguments.items())
                for i, value in enumerate(instr.outputs):
                    self.numbers[value] = number((instr.definition.name, key, i))

    def _argument_number(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            return self.number(argument)
        if isinstance(argument, (tuple, list)):
            return tuple(self._argument_number(a) for a in argument)
        return argument

    def number(self, value: Any) -> Any:
        """The number of a host scalar or plain int."""
        if not isinstance(value, Value):
            return ("int", value)
        return (
            ("value", id(value))
            if self.of(value).writes
            else self.numbers.get(value, ("value", id(value)))
        )

    # Decisions

    def _decide(self, position: int, instr: Instr) -> None:
        source = soft_source(instr)
        if source is None:
            return
        if instr.kind == "copy" and instr.arguments["t"].host != instr.outputs[0].host:
            instr.own = True
            return
        self._note_row(instr, source)
        for result in instr.outputs:
            if self.of(source) is not self.of(result) and self._observable(
                position, source, result
            ):
                instr.own = True
        if not instr.own:
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
                self.number(instr.arguments["offset"]),
            )

    def _observable(self, position: int, source: Any, result: Value) -> bool:
        """Whether someone could tell a view from a copy."""
        old, new = self.of(source), self.of(result)
        if "views_written" in self.rules and result in self.viewed:
            return True
        through = self._written_through(old, new, result)
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

    def _written_through(self, old: Storage, new: Storage, result: Value) -> Optional[int]:
        """Where a row that was loaded and changed is stored to its own place, after its last
        change. None if it is not.

        Then changing the row early is not seen by anyone: `_observable` refuses reads of the buffer
        in between.
        """
        row = self.rows.get(result)
        if row is None or not new.writes:
            return None
        buffer, number = row
        stores = self._stores.get(buffer, [])
        for position in stores[bisect_left(stores, new.writes[-1] + 1) :]:
            arguments = self.block.instrs[position].arguments
            if "own_row" not in self.rules:
                return position
            if self.number(arguments["offset"]) == number and self.identity(
                arguments["t"]
            ) is self.identity(result):
                return position
        return None

    def _separate_outputs(self) -> None:
        """Outputs of a body are independent of its inputs, of state, and of each other."""
        if "outputs_apart" not in self.rules:
            return
        taken: Set[int] = set()
        for i, value in enumerate(self.block.outputs):
            storage = self.of(value)
            if storage.reads and storage.reads[-1] == END or id(storage) in taken:
                result = Value(f"{value.name}_out{i}", value.spec, value.host)
                self.block.instrs.append(
                    Instr("copy", {"t": value}, [result], host=value.host, own=True)
                )
                self.block.outputs[i] = result
            taken.add(id(storage))


def hard_edges(instr: Instr) -> Iterable[Tuple[Value, Value]]:
    """(operand, result) pairs that share storage by contract."""
    results = (
        instr.outputs[:1]
        if instr.definition is not None and instr.definition.writes
        else instr.outputs
    )
    return [(v, result) for v in sharing(instr) for result in results]


def storage_groups(block: Block) -> Dict[Value, Value]:
    """A representative for each value that shares storage with others by contract."""
    parent: Dict[Value, Value] = {}

    def find(v: Value) -> Value:
        while v in parent:
            v = parent[v]
        return v

    for instr in block.instrs:
        for a, b in hard_edges(instr):
            if find(a) is not find(b):
                parent[find(b)] = find(a)
    return {v: find(v) for v in parent}


def is_shared(instr: Instr) -> bool:
    """Whether an instruction's result is other replicas' result, too."""
    return instr.definition is not None and instr.definition.name in SHARED and meets(instr)


def soft_source(instr: Instr) -> Any:
    """What an instruction's result could be a view of: a value, a buffer, a stream, or what
    replicas share.

    The last goes by the instruction itself. None where there is nothing.
    """
    if is_shared(instr):
        return instr
    if instr.kind == "copy":
        return instr.arguments["t"]
    definition = instr.definition
    if definition is None or definition.alias:
        return None
    if definition.name == "remote_load":
        return instr.arguments["remote_buffer"]
    if definition.name == "host_load":
        return instr.arguments["h2d_stream"]
    return instr.arguments[definition.views[0]] if definition.views else None
