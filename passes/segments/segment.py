"""What a segment is: copies of one layer, what crosses between them, and what is each copy's own."""

from dataclasses import dataclass

Copies = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """One tensor that crosses from copy to copy.

    `values` has a name more than there are copies: values[k] crosses between copy k-1 and copy k.
    `backward` False: copy k-1 makes values[k] (the rest of the graph values[0]) and copy k reads it.
    True: copy k makes values[k] (the rest values[-1]) and copy k-1 reads it.
    """

    values: tuple[str, ...]
    backward: bool

    def __str__(self) -> str:
        return (" <- " if self.backward else " -> ").join(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """A run of isomorphic copies of one layer.

    `copies[k][j]` is a node index; the nodes at position j are alike for all k: same op, same
    constants, same metas, and operands that are, at the same argument, results at one position of the
    own copy, or a border, or one of `shared`, or one of `varied[k]`, or one of `own[k]`.

    `shared` are values from outside that every copy reads alike. `varied[k]` are values from outside of one form, of
    which copy k reads these and other copies may read others: a window's mask in one layer, and the whole one in the
    next. They depend on no parameter. `own[k]` are the graph inputs
    (parameters, buffers) that copy k alone reads, `results[k]` its values that are graph outputs, both
    aligned over k. What is a gradient among them is that of one of `own[k]`, and copy k makes all that
    its own parameters get. No other value of a copy is read outside.
    """

    name: str
    copies: Copies
    borders: tuple[Border, ...]
    shared: tuple[str, ...]
    varied: tuple[tuple[str, ...], ...]
    own: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        return len(self.copies)

    def from_outside(self, copy: int) -> tuple[str, ...]:
        """What a copy reads that the rest of the graph makes, besides borders: those at one place are one value to the
        search, whatever copy they are read in."""
        return (*self.shared, *self.varied[copy])

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.count} copies of {len(self.copies[0])} nodes"]
        lines += [f"  border {border}" for border in self.borders]
        lines.append(f"  shared {', '.join(self.shared) or '-'}")
        if any(self.varied):
            lines += [f"  varied {', '.join(dict.fromkeys(names))}" for names in zip(*self.varied, strict=True)]
        lines.append(f"  own    {', '.join(self.own[0]) or '-'}, ...")
        lines.append(f"  result {', '.join(self.results[0]) or '-'}, ...")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The repeats, in the order of their first nodes, and the nodes that are in none, ascending."""

    repeats: tuple[Repeated, ...]
    rest: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.repeats), f"rest: {len(self.rest)} nodes"])
