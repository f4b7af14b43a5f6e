"""Past outputs of each namespace, and their suffix arrays, which the `suffix` method searches.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975), with suffix arrays, which a device can
search, instead of trees. The contents depend only on the calls of `add`, so processes that decode
the same requests search the same texts.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

CAPACITY = 16_384
"""Tokens kept of each namespace, with one more for the end of each output."""
NAMESPACES = 256
"""Namespaces kept."""
END = -1
"""Follows each output; smaller than every token, and never equal to a token that is searched."""


class SuffixIndex:
    """The latest outputs of each namespace; another namespace never sees them.

    Args:
      capacity: tokens kept of each namespace, with one more for the end of each output. The oldest
        outputs are dropped first; of an output longer than this, only the end is kept.
      namespaces: how many are kept; the one whose newest output is oldest is dropped.
      total: tokens kept of all namespaces together, the same way; by default as many as fit.
    """

    def __init__(
        self, capacity: int = CAPACITY, namespaces: int = NAMESPACES, total: int | None = None
    ):
        self.capacity, self.namespaces = capacity, namespaces
        self._total = capacity * namespaces if total is None else total
        self._stores: OrderedDict[str, _Store] = OrderedDict()

    def add(self, namespace: str, token_ids: Sequence[int]) -> None:
        """Stores a finished output."""
        if len(token_ids) == 0:
            return
        store = self._stores.setdefault(namespace, _Store(self.capacity))
        self._stores.move_to_end(namespace)
        store.add(token_ids)
        while len(self._stores) > self.namespaces or self.size > self._total:
            self._stores.popitem(last=False)

    @property
    def size(self) -> int:
        """Tokens kept of all namespaces, with the ends of their outputs."""
        return sum(store.size for store in self._stores.values())

    def parts(self) -> list[tuple[str, Int[np.ndarray, " size"], Int[np.ndarray, " positions"]]]:
        """Each namespace, with its outputs one after another and their suffix array."""
        return [(name, each.text(), each.order()) for name, each in self._stores.items()]

    def extend(self, namespace: str, text: Int[np.ndarray, " size"]) -> None:
        """Adds outputs that lie one after another, each followed by `END`, if they are new."""
        present = set()
        if (store := self._stores.get(namespace)) is not None:
            present = {each.tobytes() for each in store.outputs}
        for output in np.split(text, np.flatnonzero(text == END) + 1)[:-1]:
            if output.tobytes() not in present:
                self.add(namespace, output[:-1].tolist())

    def clear(self) -> None:
        """Forgets everything."""
        self._stores.clear()

    def texts(self, namespaces: Sequence[str], batch: int) -> Int[np.ndarray, "batch size"]:
        """The past outputs that the rows of a batch may learn from, each followed by `END`.

        Args:
          namespaces: the namespaces of the first rows.
          batch: rows; the others have nothing to learn from.
        """
        tokens = np.full((batch, self.capacity), END, np.int32)
        for row, namespace in enumerate(namespaces):
            if (store := self._stores.get(namespace)) is not None:
                text = store.text()
                tokens[row, : len(text)] = text
        return tokens

    def arrays(
        self, namespaces: Sequence[str], batch: int
    ) -> tuple[
        Int[np.ndarray, "batch size"], Int[np.ndarray, "batch size"], Int[np.ndarray, " batch"]
    ]:
        """The past outputs that the rows of a batch may search.

        Args:
          namespaces: the namespaces of the first rows.
          batch: rows; the others have nothing to search.

        Returns:
          Tokens, each output followed by `END`; the suffix array (positions of the tokens, sorted
          by the suffixes that start there); and the number of positions.
        """
        order = np.zeros((batch, self.capacity), np.int32)
        counts = np.zeros((batch,), np.int32)
        for row, namespace in enumerate(namespaces):
            if (store := self._stores.get(namespace)) is not None:
                positions = store.order()
                order[row, : len(positions)], counts[row] = positions, len(positions)
        return self.texts(namespaces, batch), order, counts


class _Store:
    """One namespace's outputs, joined and sorted when they are first needed after a change."""

    def __init__(self, capacity: int):
        self._capacity, self.size = capacity, 0
        self.outputs: deque[np.ndarray] = deque()
        self._text: np.ndarray | None = None
        self._order: np.ndarray | None = None

    def add(self, token_ids: Sequence[int]) -> None:
        output = np.array([*token_ids[1 - self._capacity :], END], np.int32)
        self.outputs.append(output)
        self.size += len(output)
        while self.size > self._capacity:
            self.size -= len(self.outputs.popleft())
        self._text = self._order = None

    def text(self) -> np.ndarray:
        if self._text is None:
            self._text = np.concatenate(self.outputs)
        return self._text

    def order(self) -> np.ndarray:
        if self._order is None:
            self._order = suffix_order(self.text())
        return self._order


def suffix_order(tokens: Int[np.ndarray, " size"]) -> Int[np.ndarray, " positions"]:
    """The positions of all tokens, sorted by the suffixes of their outputs that start there.

    By prefix doubling (Manber and Myers 1993). Positions with equal suffixes keep their order.

    Args:
      tokens: outputs one after another, each followed by `END`.
    """
    positions = np.arange(len(tokens))
    ends = np.flatnonzero(tokens == END)
    left = ends[np.searchsorted(ends, positions)] - positions
    rank = np.unique(tokens, return_inverse=True)[1]
    step = 1
    while True:
        # Positions past the end of an output count as its end, whose rank is 0.
        later = np.where(left > step, rank[np.minimum(positions + step, len(tokens) - 1)], 0)
        finer = np.unique(rank * len(tokens) + later, return_inverse=True)[1]
        if finer.max() == rank.max():
            return np.argsort(rank, kind="stable")[len(ends) :].astype(np.int32)
        rank, step = finer, 2 * step
