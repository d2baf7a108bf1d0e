"""The building blocks of collectives, over explicit arrays of ranks.

A phase is a list of steps. One after the other is list addition; `together` runs phases side by side.
`pieces` is a matrix whose row i holds the chunks that belong to position i of the rank list (-1 stands for
"no chunk", where the rows are not equally long). After a reduce-scatter position i holds the sum of row i;
an all-gather starts there.

`backwards` turns a reduction into the distribution that mirrors it: a reduce-scatter into an
all-gather, a reduce into a broadcast. The ring alone has both written out, since its all-gather goes
on in the same direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from offbeat.schedules.ir import Table

Phase = list[Table]
Ranks = npt.NDArray[np.int32]
Chunks = npt.NDArray[np.int32]  # one-dimensional
Pieces = npt.NDArray[np.int32]  # positions x chunks each


def sends(sources: Ranks, targets: Ranks, chunks: Pieces, *, reduce: bool) -> Table:
    """One step in which sources[i] sends row i of `chunks` to targets[i]."""
    count = chunks.shape[1]
    table = np.empty((chunks.size, 4), np.int32)
    table[:, 0] = np.repeat(sources, count)
    table[:, 1] = np.repeat(targets, count)
    table[:, 2] = chunks.ravel()
    table[:, 3] = reduce
    return table[table[:, 2] >= 0] if chunks.size and chunks.min() < 0 else table


def together(phases: Iterable[Phase]) -> Phase:
    """Phases on disjoint places, side by side: step i of the result is step i of each that has one."""
    side_by_side = list(phases)
    longest = max((len(phase) for phase in side_by_side), default=0)
    return [np.concatenate([phase[i] for phase in side_by_side if i < len(phase)]) for i in range(longest)]


def staggered(phases: Sequence[Phase]) -> Phase:
    """Phases on disjoint places, each beginning one step after the one before: while one waits for a slow link, the
    next is on the fast ones. In a step, those that began later come first.
    """
    steps = max((at + len(phase) for at, phase in enumerate(phases)), default=0)
    return [
        np.concatenate([phase[i - at] for at, phase in reversed(list(enumerate(phases))) if 0 <= i - at < len(phase)])
        for i in range(steps)
    ]


def backwards(phase: Phase) -> Phase:
    """The mirror image in time: what flowed in to be added now flows out and overwrites."""
    mirrored = [step[:, [1, 0, 2, 3]] for step in reversed(phase)]
    for step in mirrored:
        step[:, 3] = False
    return mirrored


def mirrored(phase: Callable[..., Phase]) -> Callable[..., Phase]:
    """The phase, backwards."""
    return lambda *where: backwards(phase(*where))


def and_back(phase: Callable[..., Phase]) -> Callable[..., Phase]:
    """The phase, and then its mirror image: an all-reduce out of a reduction."""

    def both(*where: npt.NDArray[np.int32]) -> Phase:
        there = phase(*where)
        return there + backwards(there)

    return both


def pieces_of(chunks: Chunks, positions: int) -> Pieces:
    """`chunks` cut into one equal run for each position."""
    return chunks.reshape(positions, -1)


# --- reduce-scatters; each has its all-gather --------------------------------------------------------------


def ring_reduce_scatter(ranks: Ranks, pieces: Pieces) -> Phase:
    """Patarasuk and Yuan 2009: n-1 steps; piece i starts at position i+1 and ends, summed, at i."""
    return _around(ranks, pieces, first=-1, reduce=True)


def ring_all_gather(ranks: Ranks, pieces: Pieces) -> Phase:
    """n-1 steps in the same direction; piece i starts at position i and visits everybody."""
    return _around(ranks, pieces, first=0, reduce=False)


def _around(ranks: Ranks, pieces: Pieces, *, first: int, reduce: bool) -> Phase:
    """In step s position i sends piece i + first - s to position i+1."""
    target = np.roll(ranks, -1)
    count = len(ranks)
    position = np.arange(count)
    return [sends(ranks, target, pieces[(position + first - step) % count], reduce=reduce) for step in range(count - 1)]


def direct_reduce_scatter(ranks: Ranks, pieces: Pieces) -> Phase:
    """1 step: everybody sends everybody else the piece that is theirs."""
    count = len(ranks)
    if count == 1:
        return []
    source, target = (side.ravel() for side in np.meshgrid(np.arange(count), np.arange(count), indexing="ij"))
    away = source != target
    source, target = source[away], target[away]
    return [sends(ranks[source], ranks[target], pieces[target], reduce=True)]


def whole_exchange(ranks: Ranks, chunks: Chunks) -> Phase:
    """1 step: everybody sends everything to everybody else, who add it up."""
    return direct_reduce_scatter(ranks, np.tile(chunks, (len(ranks), 1)))


direct_all_gather = mirrored(direct_reduce_scatter)  # 1 step: everybody sends its piece to everybody else


def halving_reduce_scatter(ranks: Ranks, pieces: Pieces) -> Phase:
    """Recursive vector halving (Thakur, Rabenseifner and Gropp 2005): floor(log2 n) steps, far partners first.

    Past a power of two the extra positions first give all they have to a partner, who hands them their
    piece at the end: two steps more.
    """
    count = len(ranks)
    core = power_of_two_below(count)
    extra = count - core
    if extra == 0:
        return _halve(ranks, pieces)
    whole = np.broadcast_to(pieces.reshape(1, -1), (extra, pieces.size))
    carried = np.full_like(pieces[:core], -1)
    carried[:extra] = pieces[core:]
    give = sends(ranks[core:], ranks[:extra], whole, reduce=True)
    hand_back = sends(ranks[:extra], ranks[core:], pieces[core:], reduce=False)
    return [give, *_halve(ranks[:core], np.concatenate([pieces[:core], carried], axis=1)), hand_back]


doubling_all_gather = mirrored(halving_reduce_scatter)  # recursive doubling


def _halve(ranks: Ranks, pieces: Pieces) -> Phase:
    """Position i and its partner i ^ d keep the half of their block in which they are, d = n/2, ..., 1."""
    count = len(ranks)
    position = np.arange(count)
    steps: Phase = []
    distance = count // 2
    while distance:
        partner = position ^ distance
        first = partner & -distance  # of the partner's half block, `distance` pieces long
        half = pieces[first[:, None] + np.arange(distance)].reshape(count, -1)
        steps.append(sends(ranks, ranks[partner], half, reduce=True))
        distance //= 2
    return steps


def halving_doubling(ranks: Ranks, chunks: Chunks) -> Phase:
    """All-reduce by halving and doubling, nearest partners first, so that most bytes go the shortest way.

    Needs a multiple of `power_of_two_below(n)` chunks. Extra ranks give all to a partner before and get
    the result after: two steps more, and still 2M(n-1) bytes in all.
    """
    count = len(ranks)
    core = power_of_two_below(count)
    extra = count - core
    # Extra ranks sit between the others (1, 3, 5, ...), so that a fold stays between neighbours.
    out = ranks[1 : 2 * extra : 2]
    partners = ranks[0 : 2 * extra : 2]
    inside = np.concatenate([partners, ranks[2 * extra :]])
    order = inside[bit_reversed(core)]  # position bits reversed: the far partner of `_halve` is the near rank
    pieces = pieces_of(chunks, core)
    whole = np.broadcast_to(chunks, (extra, len(chunks)))
    fold = [sends(out, partners, whole, reduce=True)] if extra else []
    halve = _halve(order, pieces)
    return [*fold, *halve, *backwards(halve), *backwards(fold)]


def power_of_two_below(count: int) -> int:
    """The largest power of two that is not above `count`."""
    return 1 << (count.bit_length() - 1)


def bit_reversed(count: int) -> npt.NDArray[np.int64]:
    """0..count-1 (a power of two) with the bits of each number reversed."""
    order = np.zeros(1, np.int64)
    while len(order) < count:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order


# --- reductions to the first rank of the list; backwards, broadcasts from it --------------------------------


def tree_reduce(ranks: Ranks, chunks: Chunks) -> Phase:
    """Binomial tree: ceil(log2 n) steps; in each, half of those left send all they have and are done."""
    steps: Phase = []
    stride = 1
    while stride < len(ranks):
        senders = np.arange(stride, len(ranks), 2 * stride)
        whole = np.broadcast_to(chunks, (len(senders), len(chunks)))
        steps.append(sends(ranks[senders], ranks[senders - stride], whole, reduce=True))
        stride *= 2
    return steps


def central_reduce(ranks: Ranks, chunks: Chunks) -> Phase:
    """1 step: everybody sends all to the first."""
    if len(ranks) == 1:
        return []
    whole = np.broadcast_to(chunks, (len(ranks) - 1, len(chunks)))
    return [sends(ranks[1:], np.repeat(ranks[:1], len(ranks) - 1), whole, reduce=True)]


def piped_tree(ranks: Ranks, chunks: Chunks, parents: Sequence[int]) -> Phase:
    """All-reduce over one tree: chunk after chunk goes up, is whole at the root, and comes down.

    `parents[i]` is the position above position i, -1 for the root. A chunk climbs one level a step and
    the next one follows it a step later, so n chunks take 2 * height + n - 1 steps.
    """
    above = np.asarray(parents)
    depth = np.zeros(len(ranks), np.int64)
    climbing = above.copy()
    while (climbing >= 0).any():
        depth += climbing >= 0
        climbing = np.where(climbing >= 0, above[climbing], -1)
    height = int(depth.max())
    if height == 0:
        return []
    steps: list[list[Table]] = [[] for _ in range(2 * height + len(chunks) - 1)]
    for level in range(1, height + 1):
        below = np.flatnonzero(depth == level)
        for number, chunk in enumerate(chunks):
            one = np.full((len(below), 1), chunk, np.int32)
            steps[height - level + number].append(sends(ranks[below], ranks[above[below]], one, reduce=True))
            steps[height + level - 1 + number].append(sends(ranks[above[below]], ranks[below], one, reduce=False))
    return [np.concatenate(step) for step in steps]


def in_order_tree(count: int) -> list[int]:
    """A binary tree on positions 0..count-1 in which every even position is a leaf: its parents.

    Of any range the root is the number (counted from 1) that the largest power of two divides, so that odd
    numbers have nothing below them.
    """
    parents = [-1] * count

    def plant(low: int, high: int, parent: int) -> None:
        if low > high:
            return
        power = 1 << ((low - 1) ^ high).bit_length() - 1
        root = high // power * power
        parents[root - 1] = parent
        plant(low, root - 1, root - 1)
        plant(root + 1, high, root - 1)

    plant(1, count, -1)
    return parents


# --- all-to-all -----------------------------------------------------------------------------------------------


def exchange(ranks: Ranks, distances: Sequence[int]) -> Table:
    """One step: position i sends chunk i*n + t to position t = i + d, for every d."""
    count = len(ranks)
    source = np.repeat(np.arange(count, dtype=np.int32), len(distances))
    target = (source + np.tile(np.asarray(distances, np.int32), count)) % count
    return sends(ranks[source], ranks[target], (source * count + target)[:, None], reduce=False)


# --- gathers to the first rank of the list; backwards, scatters from it ---------------------------------------------


def central_gather(ranks: Ranks, chunks: Chunks) -> Phase:
    """1 step: everybody sends its piece to the first. Pieces are numbered by rank, wherever it is in the list."""
    own = pieces_of(chunks, len(ranks))[ranks]
    return [sends(ranks[1:], np.repeat(ranks[:1], len(ranks) - 1), own[1:], reduce=False)] if len(ranks) > 1 else []


# --- on two levels: `nodes` has a row of ranks for each node; what crosses nodes crosses once ------------------------


def two_level_reduce_scatter(nodes: Ranks, pieces: Pieces) -> Phase:
    """2 steps: in a node, the pieces of every other node are added up by the rank that has the place of the owner;
    then these sums go to their owners, one from each node, and so does what the owner's own node has.
    """
    many, each = nodes.shape
    own = pieces.reshape(many, each, -1)
    at_home = [direct_reduce_scatter(row, mine) for row, mine in zip(nodes, own, strict=True)]
    across = [direct_reduce_scatter(nodes[:, place], own[:, place]) for place in range(each)]
    elsewhere = [np.delete(own, node, axis=0).transpose(1, 0, 2).reshape(each, -1) for node in range(many)]
    inside = [direct_reduce_scatter(row, theirs) for row, theirs in zip(nodes, elsewhere, strict=True)]
    return (together(inside) if many > 1 else []) + together([*at_home, *across])


def two_level_reduce(nodes: Ranks, chunks: Chunks) -> Phase:
    """To the first rank of each node in 1 step; from these to the first of all over a tree."""
    return together([central_reduce(row, chunks) for row in nodes]) + tree_reduce(nodes[:, 0], chunks)


def two_level_gather(nodes: Ranks, chunks: Chunks) -> Phase:
    """To the first rank of each node, which sends all of them on as one message."""
    own = pieces_of(chunks, nodes.size)[nodes]
    root = nodes[0, 0]
    inside = [_moves(row[1:], row[:1], mine[1:]) for row, mine in zip(nodes, own, strict=True)]
    across = [_moves(row[:1], root, mine.reshape(1, -1)) for row, mine in zip(nodes[1:], own[1:], strict=True)]
    return _steps(inside, across)


def two_level_exchange(nodes: Ranks) -> Phase:
    """All-to-all in 3 steps: what goes to another node is put together by one rank, goes there as one message, and is
    handed out. Chunk s*n + t goes from position s to position t.
    """
    many, each = nodes.shape
    positions = np.arange(nodes.size, dtype=np.int32).reshape(many, each)
    put_together: list[Table] = []
    across: list[Table] = []
    handed_out: list[Table] = []
    for one in range(many):
        for other in range(many):
            bundle = positions[one][:, None] * nodes.size + positions[other]  # from, to
            if one == other:
                for to in range(each):
                    rest = np.delete(nodes[one], to)
                    put_together.append(_moves(rest, nodes[one][to], np.delete(bundle, to, 0)[:, [to]]))
                continue
            packs, hands = other % each, one % each  # who puts together, and who hands out
            put_together.append(_moves(np.delete(nodes[one], packs), nodes[one][packs], np.delete(bundle, packs, 0)))
            across.append(_moves(nodes[one][[packs]], nodes[other][hands], bundle.reshape(1, -1)))
            rest = np.delete(nodes[other], hands)
            handed_out.append(_moves(np.full_like(rest, nodes[other][hands]), rest, np.delete(bundle.T, hands, 0)))
    return _steps(put_together, across, handed_out)


def _moves(sources: Ranks, targets: Ranks | np.int32, chunks: Pieces) -> Table:
    return sends(sources, np.broadcast_to(targets, sources.shape), chunks, reduce=False)


def _steps(*steps: list[Table]) -> Phase:
    """Those in which something is sent."""
    joined = [np.concatenate(step) for step in steps if step]
    return [step for step in joined if len(step)]
