"""Which ops of a graph have to run before which others: by the data that they hand on, and by
`in_sequence`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from popxl.context import SequenceBlock
from popxl.opdef import Op

SEARCH = 4096
"""Steps that the search for one pair of ops may take."""


class Steps:
    """Counts the steps of an analysis, up to a limit."""

    def __init__(self, limit: int | None = None) -> None:
        self.count, self.limit = 0, limit

    def take(self, number: int = 1) -> bool:
        """Count steps; whether they are within the limit."""
        self.count += number
        return self.limit is None or self.count <= self.limit


class OpOrder:
    """The order that ops of one graph are bound to.

    Nodes are the ops, in the order given, and the ends of unordered steps of a sequence; an edge
    leads to each from what it directly waits for. Every edge leads forward, and there are at most
    as many as operands and twice the ops. Three things decide whether one node comes before another
    without a search: the length of the longest way to each; a tree of the last edges of these ways
    (in it: before); and a numbering by depth-first search (not nested: not before; Yildirim and
    others 2010, GRAIL, doi 10.14778/1920841.1920879). A chain of layers with its gradient, and
    everything in one sequence, are a path of the tree, so that a search from elsewhere ends when it
    comes to that path.
    """

    def __init__(self, ops: Sequence[Op], steps: Steps) -> None:
        self.steps = steps
        edges = _Edges()
        for op in ops:
            edges.add(op)
        self._nodes, self._before = edges.nodes, edges.before
        self._after: list[list[int]] = [[] for _ in self._before]
        for node, before in enumerate(self._before):
            for other in before:
                self._after[other].append(node)
        self._number_tree()
        self._rank: list[int] = []
        self._low: list[int] = []
        steps.take(2 * (len(self._before) + sum(map(len, self._before))))

    def is_before(self, one: Op, other: Op) -> bool:
        """Whether ``one`` has to run before ``other``, which is listed later. True, too, where the
        steps run out.
        """
        a, b = self._nodes[one], self._nodes[other]
        self.steps.take()
        if self._is_in_tree(a, b):
            return True
        if not self._rank:
            self._number_depth_first()
        return self._maybe_before(a, b) and self._search(a, b)

    def _search(self, a: int, b: int) -> bool:
        """Look for a way from both ends in turn; the end whose surroundings are smaller decides."""
        ends = (_End(a, self._after), _End(b, self._before))
        left = SEARCH
        while all(end.pending for end in ends):
            for end, opposite in (ends, ends[::-1]):
                near = end.edges[end.pending.pop()] if end.pending else ()
                left -= 1 + len(near)
                if not self.steps.take(1 + len(near)) or left < 0:
                    return True
                for n in near:
                    one, other = (n, b) if end is ends[0] else (a, n)
                    if n in opposite.seen or self._is_in_tree(one, other):
                        return True
                    if n not in end.seen and self._maybe_before(one, other):
                        end.seen.add(n)
                        end.pending.append(n)
        return False

    def _is_in_tree(self, a: int, b: int) -> bool:
        return self._first[a] <= self._first[b] < self._first[a] + self._size[a]

    def _maybe_before(self, a: int, b: int) -> bool:
        """False where a certainly does not have to come before b."""
        nested = self._low[a] <= self._low[b] and self._rank[b] <= self._rank[a]
        return nested and a < b and self._level[a] < self._level[b]

    def _number_tree(self) -> None:
        """Number the tree's nodes so that those below a node follow it: ``first``, and how many
        there are: ``size``.
        """
        parents: list[int] = []
        level: list[int] = []
        for before in self._before:
            parents.append(max(before, key=lambda n: (level[n], n), default=-1))
            level.append(level[parents[-1]] + 1 if before else 0)
        self._level, self._size, self._first = level, [1] * len(parents), [0] * len(parents)
        for node in reversed(range(len(parents))):
            if parents[node] >= 0:
                self._size[parents[node]] += self._size[node]
        following, roots = [1] * len(parents), 0
        for node, parent in enumerate(parents):
            if parent < 0:
                self._first[node], roots = roots, roots + self._size[node]
            else:
                self._first[node] = self._first[parent] + following[parent]
                following[parent] += self._size[node]

    def _number_depth_first(self) -> None:
        """``rank``: in the order in which a depth-first search leaves nodes; ``low``: the least
        that a node reaches.
        """
        number = len(self._before)
        self._rank = [-1] * number
        seen, left = [False] * number, 0
        for root in range(number):
            pending = [] if seen[root] else [(root, iter(self._after[root]))]
            seen[root] = True
            while pending:
                node, following = pending[-1]
                n = next((n for n in following if not seen[n]), None)
                if n is None:
                    self._rank[node], left = left, left + 1
                    pending.pop()
                else:
                    seen[n] = True
                    pending.append((n, iter(self._after[n])))
        self._low = list(self._rank)
        for node in reversed(range(number)):
            self._low[node] = min(
                self._low[node], min((self._low[n] for n in self._after[node]), default=number)
            )


class _End:
    """One end of a search: the nodes seen from it, and those whose edges have not been followed."""

    def __init__(self, node: int, edges: list[list[int]]) -> None:
        self.edges, self.seen, self.pending = edges, {node}, [node]


@dataclass
class _Open:
    """A block of `in_sequence` whose ops come next."""

    block: SequenceBlock
    last: int | None
    """What its next op waits for; None: nothing."""
    ends: list[int] = field(default_factory=list)
    """What the next step of the block around an unordered block waits for."""


class _Edges:
    """Finds what each op directly waits for.

    The order inside a block is that of its ops as they are given: transforms may have removed,
    copied or moved some since they were made.
    """

    def __init__(self) -> None:
        self.nodes: dict[Op, int] = {}
        self.before: list[list[int]] = []
        self._open: list[_Open] = []
        self._last: dict[SequenceBlock, int] = {}
        """The last op of each outermost block."""

    def add(self, op: Op) -> None:
        """Add the next op."""
        self._enter(op.sequence_block)
        waits = {self.nodes[t._op] for t in op.inputs if t._op in self.nodes}
        block = self._open[-1] if self._open else None
        if block is not None and block.last is not None:
            waits.add(block.last)
        node = self.nodes[op] = self._node(waits)
        if block is not None:
            if block.block.is_ordered:
                block.last = node
            else:
                block.ends.append(node)

    def _node(self, waits: Iterable[int]) -> int:
        self.before.append(sorted(waits))
        return len(self.before) - 1

    def _enter(self, block: SequenceBlock | None) -> None:
        """Leave and open blocks so that ``block`` is the innermost."""
        if self._open and self._open[-1].block is block:
            return
        chain: list[SequenceBlock] = []
        while block is not None:
            chain.insert(0, block)
            block = block.around
        while [o.block for o in self._open] != chain[: len(self._open)]:
            self._leave()
        for inner in chain[len(self._open) :]:
            self._open.append(
                _Open(inner, self._open[-1].last if self._open else self._last.get(inner))
            )

    def _leave(self) -> None:
        left = self._open.pop()
        end = left.last if left.block.is_ordered else self._node(left.ends)
        if end is None:
            return
        if not self._open:
            self._last[left.block] = end
        elif self._open[-1].block.is_ordered:
            self._open[-1].last = end
        else:
            self._open[-1].ends.append(end)
