"""Placements of causal documents, which the balancer "locality" searches on few ranks.

A rank that has rows of a causal document needs its keys up to the last of these rows: the rank's reach into
the document. The keys that travel are the reaches of all ranks into all documents, less the sequence. Rows at
the end of a document have the most work, so that few of them fill a rank; the rest of its rows must be cheap
and extend no reach: whole short documents, and the first rows of a document whose end it has.

A recipe says which documents are dealt whole, and which ranks get the first rows of which documents. The
remaining documents are cut: rank by rank takes rows from the end and from the front of the longest remainder,
so many of both that the rank has its share of rows and of work. The work of the first x rows is about x**2,
which makes that a linear equation. The best of many random recipes are varied for some generations. All sums
whose order depends on the processor are of whole numbers: every rank of a job finds the same placement.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritoncp.planning.work import Work, transpose_runs

MAX_DOCUMENTS = 64  # a search takes a second for so many on 8 ranks, two on 16
RECIPES = 2048  # of one generation
SURVIVORS = 128  # recipes of a generation that the next one varies
GENERATIONS = 50
MAX_SEARCHES = 3  # of different random numbers
MAX_SEARCHED_SIZE = 384  # searches x documents x ranks, where there is more than one search
MAX_WORK_RATIO = 1.0175  # largest work of a rank over the mean, as documents model it
MAX_MODEL_ERROR = 0.1  # of the work of blocks, as a share, where documents count as causal
EXCESS_PRICE = 20.0  # of a rank's work above the largest, in sequences of keys
MAX_SOURCES = 3  # documents that a rank takes rows of, besides those that the recipe gives it


class Documents(NamedTuple):
    """Causal documents. The first x rows of one have work x**2 + slope * x.

    lengths: float64 [documents], in blocks
    slope:   float64 [documents]
    """

    lengths: Tensor
    slope: Tensor

    @classmethod
    def fit(cls, costs: Tensor, starts: Tensor) -> Documents | None:
        """Fit documents to the costs of blocks; None if costs do not rise by the same step in every document.

        starts: the first block of each document, and the number of blocks
        """
        lengths = starts.diff()
        longest = int(lengths.argmax())
        quarter = int(lengths[longest]) // 4  # the first and the last block may belong to other documents too
        low, high = int(starts[longest]) + quarter, int(starts[longest + 1]) - 1 - quarter
        step = float(costs[high] - costs[low]) / max(1, high - low)
        if step <= 0:
            return None
        document = torch.arange(len(lengths)).repeat_interleave(lengths)
        place = torch.arange(len(costs)) - starts[document]
        base = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, document, costs / step - place)
        base = (base / lengths * 16).round() / 16  # sums of few binary digits do not depend on their order
        error = float((costs - step * (place + base[document])).abs().sum())
        return cls(lengths.double(), 2 * base - 1) if error <= MAX_MODEL_ERROR * float(costs.sum()) else None

    def work(self, rows: Tensor, document: Tensor | slice = slice(None)) -> Tensor:
        """Return the work of the first rows of documents."""
        return rows * (rows + self.slope[document])


class Recipes(NamedTuple):
    """Recipes for placements, one a row.

    whole:     int64 [recipes, documents], the rank that gets the document, behind its head; -1: it is cut
    head_rank: int64 [recipes, documents], the rank that gets the first rows; -1: none
    head:      float64 [recipes, documents], the number of these rows, as a share of the document
    second:    bool [recipes, ranks], whether a rank cuts the second longest remainder, not the longest
    """

    whole: Tensor
    head_rank: Tensor
    head: Tensor
    second: Tensor

    def take(self, rows: Tensor) -> Recipes:
        return Recipes(*(field[rows] for field in self))


class Pieces(NamedTuple):
    """Pieces of documents that recipes deal, with their price.

    reach:  float64 [recipes], the sum of all reaches, in blocks
    excess: float64 [recipes], work above the limit, and rows that no rank has room for, in shares of a rank
    cuts:   (rank, document [recipes], front [recipes], end of the front, start of the end, end) of each step;
            the rank has the blocks from front to end of the front, and from start of the end to end
    """

    reach: Tensor
    excess: Tensor
    cuts: list[tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]]


def place_documents(work: Work, costs: Tensor) -> Tensor | None:
    """Return the owner of each block, int64 [blocks]; None if these are not a few causal documents.

    Ranks hold nearly equal numbers of blocks. costs: those of the work, on the CPU, float64
    """
    n = len(costs)
    starts = torch.tensor([*document_starts(work), n])
    documents = Documents.fit(costs, starts) if 1 < len(starts) - 1 <= MAX_DOCUMENTS else None
    if documents is None:
        return None
    recipe = search_recipe(documents, work.world_size)
    owner = torch.zeros(n, dtype=torch.int64)
    bounds = starts.tolist()
    heads = (recipe.head * documents.lengths).floor()[0].long().tolist()
    for document, (rank, head_rank) in enumerate(
        zip(recipe.whole[0].tolist(), recipe.head_rank[0].tolist(), strict=True)
    ):
        first, end = bounds[document : document + 2]
        owner[first:end] = max(rank, 0)
        if head_rank not in (-1, rank):
            owner[first : first + heads[document]] = head_rank
    for rank, index, *edges in cut_documents(recipe, documents, work.world_size).cuts:
        front, front_end, start, end = (bounds[int(index)] + int(edge) for edge in edges)
        owner[front:front_end] = rank
        owner[start:end] = rank
    return owner


def document_starts(work: Work) -> list[int]:
    """Return the first block of each document. No pair crosses a document boundary between blocks; if a
    document ends inside a block, the block behind is a start, and sees only that block across the boundary.
    Of several masks, the boundaries that all have."""
    n = len(work.costs)
    crossings = torch.zeros(n + 2, dtype=torch.int64)  # [i]: number of blocks that are seen across cut i
    for sees in work.sees if work.together else ():
        column, first, last = transpose_runs(sees, n, n).unbind(1)
        low = torch.full((n,), n).scatter_reduce_(0, column, first, "amin")
        high = torch.zeros(n, dtype=torch.int64).scatter_reduce_(0, column, last, "amax")
        blocks = torch.arange(n)
        steps = torch.zeros(n + 2, dtype=torch.int64)
        for begin, end in ((blocks + 1, high), (low + 1, blocks + 1)):  # cuts between a block and its readers
            nonempty, ones = end > begin, torch.ones_like(blocks)
            steps.index_add_(0, begin[nonempty], ones[nonempty]).index_add_(0, end[nonempty], -ones[nonempty])
        crossings = torch.maximum(crossings, steps.cumsum(0))
    crossing, crossing_before = crossings[1:n], crossings[: max(0, n - 1)]
    starts = (crossing == 0) | ((crossing == 1) & (crossing_before > 0))
    return [0] * (n > 0) + ((starts if work.sees else starts[:0]).nonzero()[:, 0] + 1).tolist()


def search_recipe(documents: Documents, world_size: int) -> Recipes:
    """Search the recipe whose ranks need the fewest keys, for documents of these numbers of blocks.

    >>> documents = Documents(torch.tensor([4.0, 4, 4, 4], dtype=torch.float64), torch.zeros(4))
    >>> cut_documents(search_recipe(documents, 2), documents, 2).reach.tolist()  # two whole ones each
    [16.0]
    """
    searches = max(1, min(MAX_SEARCHES, MAX_SEARCHED_SIZE // (len(documents.lengths) * world_size)))
    results = [_search_once(documents, world_size, seed) for seed in range(searches)]
    return min(results, key=lambda result: result[0])[1]


def _search_once(documents: Documents, world_size: int, seed: int) -> tuple[float, Recipes]:
    """Draw recipes and vary the best ones: the price of the best of all, and the recipe."""
    generator = torch.Generator().manual_seed(seed)
    lengths, work = documents.lengths, documents.work(documents.lengths)
    most_work = MAX_WORK_RATIO * work.sum() / world_size
    short = (work <= most_work) & (lengths <= lengths.sum() / world_size)
    recipes = _draw_recipes(short, world_size, generator)
    for generation in range(GENERATIONS):
        pieces = cut_documents(recipes, documents, world_size)
        price = pieces.reach / lengths.sum() + EXCESS_PRICE * pieces.excess
        price, order = price.sort(stable=True)
        best = order[torch.cat([price[:1] < torch.inf, price[1:] > price[:-1]])][:SURVIVORS]  # no copies
        if generation < GENERATIONS - 1:
            parents = torch.randint(len(best), (RECIPES - len(best),), generator=generator)
            recipes = recipes.take(torch.cat([best, best[parents]]))
            _vary_recipes(recipes, len(best), short, generator)
    return float(price[0]), recipes.take(best[:1])


def _draw_recipes(short: Tensor, world_size: int, generator: torch.Generator) -> Recipes:
    """Draw the first generation: four of five short documents are dealt whole, the long ones are cut."""
    shape = (RECIPES, len(short))
    whole = torch.randint(world_size, shape, generator=generator)
    whole[torch.rand(shape, generator=generator) < 0.2] = -1
    whole[:, ~short] = -1
    head = 0.4 * torch.rand(shape, generator=generator, dtype=torch.float64)
    second = torch.rand(RECIPES, world_size, generator=generator) < 0.15
    return Recipes(whole, torch.full(shape, -1), head, second)


def _vary_recipes(recipes: Recipes, first: int, short: Tensor, generator: torch.Generator) -> None:
    """Change recipes from the ``first`` on, in place: swap the ranks of two short documents, deal one to
    another rank or cut it, and the same for heads and for the choice of remainders."""
    world_size, documents = recipes.second.shape[1], len(short)
    rows, n = torch.arange(first, len(recipes.whole)), len(recipes.whole) - first

    def chance(share: float) -> Tensor:
        return torch.rand(n, generator=generator) < share

    def pick(limit: int) -> Tensor:
        return torch.randint(limit, (n,), generator=generator)

    def change(field: Tensor, at: Tensor, where: Tensor, values: Tensor) -> None:
        field[rows[where], at[where]] = values[where]

    choices = short.nonzero()[:, 0]
    if len(choices):
        for share in (0.4, 0.15):
            one, two = choices[pick(len(choices))], choices[pick(len(choices))]
            change(recipes.whole, one, chance(share), pick(world_size + 1) - 1)
            swapped, one_rank, two_rank = chance(0.4), recipes.whole[rows, one], recipes.whole[rows, two]
            change(recipes.whole, one, swapped, two_rank)
            change(recipes.whole, two, swapped, one_rank)
    rank = pick(world_size)
    change(recipes.second, rank, chance(0.2), ~recipes.second[rows, rank])
    document, new = pick(documents), chance(0.4)
    change(recipes.head_rank, document, new, torch.where(chance(0.5), -1, pick(world_size)))
    factor = torch.rand(n, generator=generator, dtype=torch.float64)
    head = torch.where(new, 0.4 * factor, recipes.head[rows, document] * (0.7 + 0.6 * factor))
    change(recipes.head, document, new | chance(0.4), head.clamp(max=0.6))


def cut_documents(recipes: Recipes, documents: Documents, world_size: int) -> Pieces:
    """Deal the documents of every recipe: whole ones and heads first, then cuts, rank by rank."""
    whole, head_rank, head, second = recipes
    lengths, total = documents.lengths, documents.work(documents.lengths)
    rows, n = torch.arange(len(whole)), int(lengths.sum())
    most_work = MAX_WORK_RATIO * total.sum() / world_size
    head = torch.where((head_rank >= 0) & (head_rank != whole), (head * lengths).floor(), 0.0)
    used, used_work = torch.zeros(2, len(whole), world_size + 1, dtype=torch.float64)  # [0] of documents cut
    for size, of_body, of_head in (
        (used, lengths - head, head),
        (used_work, total - documents.work(head), documents.work(head)),
    ):
        size.scatter_add_(1, whole + 1, of_body).scatter_add_(1, head_rank + 1, of_head)
    is_cut = whole < 0
    front, end = torch.where(is_cut, head, 0.0), torch.where(is_cut, lengths, 0.0)
    reach = torch.where(is_cut, 0.0, lengths).sum(1) + head.sum(1)
    excess, cuts = torch.zeros(len(whole), dtype=torch.float64), []
    for rank in range(world_size):
        share = n * (rank + 1) // world_size - n * rank // world_size
        room, work = share - used[:, rank + 1], most_work - used_work[:, rank + 1]
        excess += (-room).clamp(min=0) / share
        room = room.clamp(min=0)
        for source in range(MAX_SOURCES):
            document = _longest(end, second[:, rank] if source == 0 else None)
            low, high = front[rows, document], end[rows, document]
            rest = high - low
            taken, all_of_it = torch.minimum(room, rest), room >= rest
            # Rows from the front have the least work; each swapped for one from the end adds as much.
            least = documents.work(low + taken, document) - documents.work(low, document)
            tail = ((work - least) / (2 * (rest - taken)).clamp(min=1)).floor().clamp(min=0)
            tail = torch.where(all_of_it, taken, torch.minimum(tail, taken))
            low_end, high_start = low + taken - tail, high - tail
            farthest = torch.where(tail > 0, high, low_end)
            reach += torch.where(taken > 0, farthest, 0.0)
            work = work - least - torch.where(all_of_it, 0.0, 2 * tail * (rest - taken))
            room = room - taken
            cuts.append((rank, document, low, low_end, high_start, high))
            front[rows, document] = torch.where(all_of_it, 0.0, low_end)
            end[rows, document] = torch.where(all_of_it, 0.0, high_start)
        excess += (-work).clamp(min=0) / most_work + room / share
    return Pieces(reach, excess, cuts)


def _longest(end: Tensor, second: Tensor | None) -> Tensor:
    """Return the document with the last end in each row; where ``second``, the second last, if any."""
    longest = end.argmax(1)
    if second is None:
        return longest
    value, runner_up = end.scatter(1, longest[:, None], 0.0).max(1)
    return torch.where(second & (value > 0), runner_up, longest)
