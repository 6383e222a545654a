"""Plans side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.planning.plan import Plan, bytes_text, seconds_text, table


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
        plans = sorted(
            ((name, p) for name, p in self.results.items() if isinstance(p, Plan)), key=lambda r: r[1].seconds
        )
        heads = "solver, step, compute, communication, exposed, copies, optimizer, peak memory, sent, solve, gap"
        rows = [tuple(heads.split(", "))]
        for name, p in plans:
            a = p.account
            sent = sum(c.bytes for c in a.collectives)
            communication = (a.communication_seconds, p.exposed_seconds)
            parts = (p.seconds, a.compute_seconds, *communication, a.copy_seconds, a.optimizer_seconds)
            gap = "-" if p.gap is None else f"{p.gap:.1%}"
            sizes = bytes_text(p.bytes), bytes_text(sent)
            rows.append((name, *map(seconds_text, parts), *sizes, f"{p.solve_seconds:.2f} s", gap))
        lines = table(rows)
        lines += [f"{name}: no plan: {p}" for name, p in self.results.items() if isinstance(p, str)]
        return "\n".join(lines)

    def collectives(self) -> str:
        """Bytes and seconds of each plan's collectives, by kind and mesh axis, as a table."""
        rows: list[tuple[str, ...]] = [("solver", "collective", "axis", "count", "bytes", "seconds")]
        for name, p in self.results.items():
            if isinstance(p, Plan):
                rows += [
                    (name, c.kind, c.axis, str(c.count), bytes_text(c.bytes), seconds_text(c.seconds))
                    for c in p.account.collectives
                ]
        return "\n".join(table(rows))
