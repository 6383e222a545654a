"""Plans side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from autopar.planning.plan import Plan
from autopar.planning.rendering import rendered, tables
from autopar.planning.texts import short_bytes, short_seconds


@dataclass(frozen=True)
class Comparison:
    """Solver -> plan, or the reason why there is none. Prints as a table, best first: the predicted step, what of it is
    computed and communicated, and the peak of a rank. With several meshes or clusters, names are those of the solver,
    the mesh and the cluster: "fsdp dp=8 dgx-a100"."""

    results: Mapping[str, Plan | str]

    @property
    def best(self) -> str:
        """The solver with the shortest predicted step. Raises ValueError if none has a plan."""
        plans = {name: p for name, p in self.results.items() if isinstance(p, Plan)}
        if not plans:
            raise ValueError(f"no solver found a plan: {dict(self.results)}")
        return min(plans, key=lambda name: plans[name].seconds)

    def to_json(self) -> dict[str, Any]:
        """Each plan as `Plan.to_json` gives it, or {"error": why there is none}, by name."""
        return {name: p.to_json() if isinstance(p, Plan) else {"error": p} for name, p in self.results.items()}

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 80) -> str:
        """The table in at most so many columns; where it is wider, its columns follow in a second one."""
        plans = [(name, p) for name, p in self.results.items() if isinstance(p, Plan)]
        rows = [_row(name, plan) for name, plan in sorted(plans, key=lambda row: row[1].seconds)]
        parts: list[RenderableType] = []
        for grid in tables(HEADS, rows, width, keys=1, right=range(1, len(HEADS))) if rows else []:
            parts += [Text(""), grid] if parts else [grid]
        parts += [Text(f"{name}: no plan: {p}") for name, p in self.results.items() if isinstance(p, str)]
        return rendered(parts, width)

    def collectives(self, width: int = 80) -> str:
        """Bytes and seconds of each plan's collectives, by kind and mesh axis, as a table."""
        rows = [
            (name, c.kind, c.axis, f"{c.count:,}", short_bytes(c.bytes), short_seconds(c.seconds))
            for name, p in self.results.items()
            if isinstance(p, Plan)
            for c in p.account.collectives
        ]
        heads = ("solver", "collective", "axis", "count", "bytes", "seconds")
        return rendered(tables(heads, rows, width, keys=3, right=range(3, 6)), width)


HEADS = (
    "solver", "step", "peak memory", "compute", "communication", "exposed",
    "copies", "optimizer", "sent", "solve", "gap",
)  # fmt: skip


def _row(name: str, plan: Plan) -> tuple[str, ...]:
    account = plan.account
    return (
        name,
        short_seconds(plan.seconds),
        short_bytes(plan.bytes),
        short_seconds(account.compute_seconds),
        short_seconds(account.communication_seconds),
        short_seconds(plan.exposed_seconds),
        short_seconds(account.copy_seconds),
        short_seconds(account.optimizer_seconds),
        short_bytes(sum(collective.bytes for collective in account.collectives)),
        f"{plan.solve_seconds:.2f} s",
        "-" if plan.gap is None else f"{plan.gap:.1%}",
    )
