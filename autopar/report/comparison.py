"""Plans side by side."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.planning.plan import Plan
from autopar.planning.texts import by_reason, grouped, listed

from .document import Document
from .facts import COLUMNS, figures_of
from .rendering import rendered
from .sections import Grid, Lines, Row, Section, without


@dataclass(frozen=True)
class Comparison(Document):
    """Solver -> plan, or the reason why there is none. Prints as a table, best first: the predicted step, what of it is
    computed and communicated, and the peak of a rank. With several meshes or clusters, names are those of the solver,
    the mesh and the cluster: "fsdp dp=8 dgx-a100"."""

    results: Mapping[str, Plan | str]

    @property
    def plans(self) -> dict[str, Plan]:
        """The plans by name, best first."""
        found = {name: p for name, p in self.results.items() if isinstance(p, Plan)}
        return dict(sorted(found.items(), key=lambda item: item[1].seconds))

    @property
    def best(self) -> str:
        """The solver with the shortest predicted step. Raises ValueError if none has a plan."""
        if not self.plans:
            raise ValueError(f"no solver found a plan: {dict(self.results)}")
        return next(iter(self.plans))

    @property
    def refused(self) -> dict[str, str]:
        """Why there is no plan, by name."""
        return {name: p for name, p in self.results.items() if isinstance(p, str)}

    def rows(self) -> list[Row]:
        """What people compare: a row for each plan, best first, and then for each name that has none."""
        return [
            *({"plan": name, **figures_of(p), "error": ""} for name, p in self.plans.items()),
            *({"plan": name, **dict.fromkeys(COLUMNS), "error": error} for name, error in self.refused.items()),
        ]

    def collectives(self) -> list[Row]:
        """What each plan sends: a row for each kind of collective on each mesh axis."""
        return [
            {
                "plan": name,
                "collective": c.kind,
                "axis": c.axis,
                "count": c.count,
                "bytes": c.bytes,
                "seconds": c.seconds,
            }
            for name, plan in self.results.items()
            if isinstance(plan, Plan)
            for c in plan.account.collectives
        ]

    def to_json(self) -> dict[str, Any]:
        """Both tables, as plain dicts, lists, numbers and texts. `Plan.to_json` has a whole plan."""
        return {"rows": self.rows(), "collectives": self.collectives()}

    def alike(self) -> dict[str, list[str]]:
        """Name -> the names of the same plan, that one first; each plan once, best first."""
        same = grouped(((p.digest, p.cluster, p.seconds, p.bytes), name) for name, p in self.plans.items())
        return {names[0]: names for names in same.values()}

    def sections(self) -> Iterator[Section]:
        """The table. The same plan of several stands there once, and so does a reason why there is none."""
        alike, plans = self.alike(), self.plans
        rows: list[Row] = [{"plan": name, **without(figures_of(plans[name]), *ROWS_ALONE)} for name in alike]
        told = [f"{listed(same)}: the plan of {name} too" for name, (_, *same) in alike.items() if same]
        refused = by_reason((name.split(" ")[0], name, error) for name, error in self.refused.items())
        told += [f"{listed(names)}: no plan: {reason}" for names, reason in refused]
        yield Section("", [Grid.of(rows), Lines(told, indent=0)])

    def text(self, width: int | None = 80, *, full: bool = False) -> str:
        """The table, and, if it is to be `full`, what each plan sends."""
        if not full:
            return super().text(width)
        sent = [row for row in self.collectives() if row["plan"] in self.alike()]
        return rendered([*self.sections(), Section("", [Grid.of(sent, keys=3)])], width)


ROWS_ALONE = ("solver", "mesh", "cluster", "MFU")
"""Columns that the text leaves out, which has little room."""
