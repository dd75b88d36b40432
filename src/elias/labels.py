"""The table of labels: names, and optionally ids, synonyms, descriptions and a hierarchy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from elias.errors import DataError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

LabelRow: TypeAlias = tuple[str, str, tuple[str, ...], str, tuple[str, ...]]
"""Name, id, synonyms, description and broader labels of a label."""


@dataclass(frozen=True, slots=True)
class LabelTable(Sequence[str]):
    """The names of L labels, with their ids, synonyms and descriptions if these are known.

    A table is a sequence of names, so it can be used in place of a list of label names. The
    position of a label is its label id in the model; names may repeat.

    >>> table = LabelTable(("Neoplasms", "Mice"), ids=("D009369", "D051379"),
    ...                    synonyms=(("Cancer", "Tumors"), ()), descriptions=("New growth.", ""))
    >>> table[0], len(table)
    ('Neoplasms', 2)
    >>> table.texts()
    ['Neoplasms. Cancer. Tumors. New growth.', 'Mice']
    >>> table.match(["D051379", "Neoplasms", "cod"])
    [1, 0, None]
    """

    names: tuple[str, ...]
    ids: tuple[str, ...] | None = None
    """Identifier or URI of each label in the user's vocabulary, or an empty string."""
    synonyms: tuple[tuple[str, ...], ...] | None = None
    """Other names of each label."""
    descriptions: tuple[str, ...] | None = None
    """A sentence or more about each label, or an empty string."""
    broader: tuple[tuple[str, ...], ...] | None = None
    """Ids (or names) of the broader labels of each label, such as its parent in a thesaurus."""

    def __post_init__(self) -> None:
        """Check that all columns have the same length."""
        for name in ("ids", "synonyms", "descriptions", "broader"):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.names):
                raise DataError(
                    f"label table: {len(column)} {name} for {len(self.names)} names; give as many "
                    f"{name} as names"
                )

    @classmethod
    def of(cls, names: Sequence[str]) -> LabelTable:
        """Return ``names`` itself if it is a table, else a table that has only these names."""
        return names if isinstance(names, LabelTable) else cls(tuple(names))

    @classmethod
    def from_rows(cls, rows: Iterable[LabelRow]) -> LabelTable:
        """Return a table of labels. Columns that are empty for every label become None.

        Each row has the name, id, synonyms, description and broader labels of a label.
        """
        names, *details = zip(*rows, strict=True)
        return cls(names, *(column if any(column) else None for column in details))

    @property
    def columns(self) -> tuple[Any, ...]:
        """Return the names, ids, synonyms, descriptions and broader labels. Each may be None."""
        return self.names, self.ids, self.synonyms, self.descriptions, self.broader

    def __len__(self) -> int:
        """Return the number of labels."""
        return len(self.names)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        """Return the name of one label, or a tuple of names for a slice."""
        return self.names[index]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.names)

    @property
    def has_details(self) -> bool:
        """Return whether the table has ids, synonyms, descriptions or broader labels."""
        return any(column is not None for column in self.columns[1:])

    def id(self, label: int) -> str | None:
        """Return the id of a label in the user's vocabulary, or None if it does not have one."""
        return None if self.ids is None else self.ids[label] or None

    def about(self, label: int) -> tuple[tuple[str, ...], str | None]:
        """Return the synonyms of a label, and its description or None."""
        synonyms = () if self.synonyms is None else self.synonyms[label]
        return synonyms, None if self.descriptions is None else self.descriptions[label] or None

    def rows(self) -> Iterator[LabelRow]:
        """Yield name, id, synonyms, description and broader labels of each label."""
        defaults = zip(self.columns, ("", "", (), "", ()), strict=True)
        return zip(*(column or (default,) * len(self) for column, default in defaults), strict=True)

    def texts(self) -> list[str]:
        """Return the label text of each label: its name, synonyms and description."""
        return [
            ". ".join(filter(None, (name, *synonyms, description)))
            for name, _, synonyms, description, _ in self.rows()
        ]

    def take(self, labels: Iterable[int]) -> LabelTable:
        """Return the table of some labels, in the given order."""
        chosen = list(labels)
        columns: Any = (c and tuple(c[label] for label in chosen) for c in self.columns)
        return LabelTable(*columns)

    def __add__(self, other: LabelTable) -> LabelTable:
        """Return a table with the labels of this table, followed by the labels of ``other``."""
        rows = [*self.rows(), *other.rows()]
        return LabelTable.from_rows(rows) if rows else self

    def match(self, labels: Sequence[str]) -> list[int | None]:
        """Return for each of ``labels`` its position in this table, or None if it has none.

        A label is matched by its id if ``labels`` is a table with ids, else by its name. An item of
        a plain list may also be an id of this table. If a name occurs several times in this table,
        its first position is returned. Labels with different ids never match.
        """
        by_name = {name: label for label, name in reversed(list(enumerate(self.names)))}
        by_id = {key: label for label, key in enumerate(self.ids or ()) if key}

        def find(name: str, key: str) -> int | None:
            label = by_id.get(key or name)
            if label is None:
                label = by_name.get(name)
                if label is not None and key and self.id(label):
                    return None
            return label

        return [find(name, key) for name, key, *_ in LabelTable.of(labels).rows()]

    def broader_groups(self) -> dict[str, list[int]]:
        """Return a dictionary from the name of each broader label to its narrower labels.

        >>> table = LabelTable(("animals", "mice"), ids=("1", "2"), broader=((), ("1",)))
        >>> table.broader_groups()
        {'animals': [1]}
        """
        narrower, groups = self.broader_matrix().T.tocsr(), dict[str, list[int]]()
        for label, name in enumerate(self):
            labels = narrower.indices[narrower.indptr[label] : narrower.indptr[label + 1]]
            if len(labels):
                groups.setdefault(name, []).extend(labels.tolist())
        return groups

    def broader_matrix(self) -> csr_matrix:
        """Return the (L, L) matrix with entry (i, j) = 1 if label j is broader than label i.

        Broader labels that are not in the table are left out. The diagonal is 0.

        >>> table = LabelTable(("animals", "mice"), ids=("1", "2"), broader=((), ("1",)))
        >>> table.broader_matrix().toarray().tolist()
        [[0, 0], [1, 0]]
        """
        import numpy as np
        from scipy.sparse import csr_matrix

        parents = self.broader or ((),) * len(self)
        flat = iter(self.match([key for keys in parents for key in keys]))
        pairs = {(label, next(flat)) for label, keys in enumerate(parents) for _ in keys}
        entries = [(i, j) for i, j in pairs if j is not None and i != j]
        rows, columns = np.array(entries, dtype=np.int64).reshape(-1, 2).T
        shape = (len(self), len(self))
        return csr_matrix((np.ones(len(rows), dtype=np.int64), (rows, columns)), shape=shape)
