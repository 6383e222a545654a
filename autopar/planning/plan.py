"""A plan: where every value lives on the mesh, what that costs, and why.

A plan shows people a solver's choice as text and as JSON that they can edit, and determines the program for the same
model and mesh.
"""

from __future__ import annotations

import hashlib
import json
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult

from autopar.files import reading
from autopar.files.typed import read, schema
from autopar.ir.graph import JointGraph
from autopar.ir.program import Program

from .explain.answer import Answers, Explanation
from .page import full_text, page, page_text, page_width
from .page.html import notebook_html
from .record import ParameterPlan, Record, Run, Segment
from .request import LimitFrom
from .saved import FORMAT, may_be_plan, of_format, saved
from .texts import bytes_text, seconds_text, table


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Record):
    """A plan, its file, its texts, and its answers. It prints as one page.

    `decisions` and `segments` are the plan; the other fields describe it. `seconds` is the predicted step, in seconds,
    with overlap, and `bytes` the predicted peak of a rank. `parameters` and `inputs` have placements, one for each mesh
    axis. `account` itemises the step as if nothing overlapped, `timing` where it goes, `peak` what the memory is.
    docs/files.md lists every field.
    """

    def answering(self, answers: Answers) -> Plan:
        """The plan with what answers questions about it: it stays in this process."""
        plan = copy(self)
        plan.__dict__["answers"] = answers
        return plan

    @property
    def _answers(self) -> Answers | None:
        answers: Answers | None = self.__dict__.get("answers")
        return answers

    def explain(self, name: str, *, replan: int = 0) -> Explanation:
        """Why a parameter, an input, a module, an operator or a collective is planned so: each alternative with all
        else as it is, in seconds and bytes, what it changes, and what speaks for the choice. The `replan` most
        promising alternatives are also pinned, with everything else planned again (about as long as planning, each).

        `name` is that of a parameter or an input ("lm_head.weight"), of a module ("model.layers.*.mlp"), of an
        operator, as in `decisions`, or a collective on a mesh axis ("all_gather tp"). Raises ValueError for a name that
        the plan does not have, and for a plan without its model: `autopar.read_plan` reads a file with it.
        """
        return self._opened().explain(self, name, replan=replan)

    def anatomy(self) -> Any:
        """The plan's timeline, its memory over the step, segments, blocks and links (`explain.anatomy.Anatomy`),
        computed again from the model. Raises ValueError for a plan without its model, as `explain`."""
        return self._opened().anatomy(self)

    def program(self, rewrites: str | None = None) -> Program:
        """The program that each rank runs, written again from the model; `print` shows it as Python. It is the one that
        `parallelize` runs; or, with other `rewrites` than the plan's, such as "" or "bucket,slice{parts=4}", the one
        that these write. Raises ValueError for a plan without its model, as `explain`, and for what is no rewrite."""
        return self._opened().program(self, rewrites)

    def joint_graph(self) -> JointGraph:
        """The model's graph, forward and backward, for which the plan is made. Raises ValueError as `explain`."""
        return self._opened().joint_graph()

    def _opened(self) -> Answers:
        if self._answers is None:
            raise ValueError(
                "this plan was read without its model, which questions need: read it with "
                "autopar.read_plan(path, model, kwargs=batch)"
            )
        return self._answers

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "answers"}

    def to_json(self) -> dict[str, Any]:
        """What `save` writes: plain dicts, lists, numbers and texts."""
        fields = {**asdict(self), "training": self.training.given}
        said = {name: value for name, value in fields.items() if value or name not in ("training", "checkpoints")}
        return {"format": FORMAT, **said, "headroom_bytes": self.headroom_bytes}

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, over an earlier plan if there is one. Raises ValueError if the file cannot be
        written, or holds something else than a plan."""
        path = Path(path)
        try:
            self.check_path(path)
            path.write_text(json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise ValueError(f"{path} cannot be written ({error.strerror}): give the path of a file") from error

    @staticmethod
    def check_path(path: Path | None) -> None:
        """Raises ValueError for a file that holds something else than a plan."""
        if path is not None and path.exists() and not path.is_dir() and not may_be_plan(path):
            raise ValueError(f"{path} is there, and is no plan: move it away, or give another path")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what `save` wrote, maybe edited since. Figures are those of the file; `autopar.read_plan` computes them
        again. Raises ValueError if the file is no plan, naming the field that is missing, unknown or invalid."""
        return Plan.from_json(saved(path), str(path))

    @staticmethod
    def from_json(data: Any, source: str = "the plan") -> Plan:
        """Read what `to_json` returned; `source` names it in errors. Raises ValueError if a field is missing, unknown
        or invalid."""
        data = of_format(data, source)
        with reading(f"{source} is no plan", "correct it there, or save the plan again"):
            given = {name: value for name, value in data.items() if name not in ("format", "headroom_bytes")}
            # files from before it was written have given limits, or none
            given.setdefault("memory_limit_from", "lifted" if data.get("memory_limit_bytes") is None else "given")
            if "objective_bound_seconds" not in given and "lower_bound_seconds" in given:
                # files from before bounds were those of the step have one of the objective
                given |= {"objective_bound_seconds": given["lower_bound_seconds"], "lower_bound_seconds": 0.0}
            return read(Plan, given)

    @staticmethod
    def schema() -> dict[str, Any]:
        """JSON Schema of the file that `save` writes."""
        whole = schema(Plan, format={"const": FORMAT}, headroom_bytes={"type": ["number", "null"]})
        return {**whole, "required": ["format", *whole["required"]]}

    def __post_init__(self) -> None:
        """Raises ValueError for what types do not say."""
        placed = {f"inputs[{name!r}]": [placements] for name, placements in self.inputs.items()}
        placed |= {f"parameters[{name!r}]": [p.at_rest, *p.in_use] for name, p in self.parameters.items()}
        for where, layouts in placed.items():
            for layout in layouts:
                if len(layout) != len(self.mesh):
                    raise ValueError(f"{where} has {len(layout)} placements: one for each of {len(self.mesh)} axes")

    def text(self, *, full: bool = False, width: int | None = None) -> str:
        """The plan on one page of so many columns (those of the terminal if not given), or all that it says."""
        width = page_width() if width is None else width
        return full_text(self, width) if full else page_text(self, width)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={n}" for axis, n in self.mesh.items())
        return (
            f"<Plan of {self.model} on {mesh} of {self.cluster}, by {self.solver}: step {seconds_text(self.seconds)}, "
            f"peak {bytes_text(self.bytes)}>"
        )

    def _repr_html_(self) -> str:
        return notebook_html(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from page(self, options.max_width)


def graph_digest(graph: JointGraph) -> str:
    """Equal for two captures of the same model with the same input shapes."""
    return hashlib.sha256(str(graph).encode()).hexdigest()[:16]


__all__ = [
    "LimitFrom",
    "ParameterPlan",
    "Plan",
    "Run",
    "Segment",
    "bytes_text",
    "graph_digest",
    "seconds_text",
    "table",
]
