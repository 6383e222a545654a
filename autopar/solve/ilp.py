"""The integer linear program, solved by HiGHS through OR-Tools MathOpt."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from itertools import product

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from .effort import EFFORT, Effort, Meter
from .expand import expand
from .problem import (
    TIE_BREAK_SECONDS_PER_BYTE,
    Choice,
    Infeasible,
    Problem,
    Solution,
    Tensor,
    TooWide,
    check,
    evaluate,
)
from .rows import Floats, Row, tensor_rows, undominated, united

GAP_WITHOUT_LIMIT = 1e-9
GAP_WITH_LIMIT = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerProgram:
    """An integer program under construction: columns with two costs, and rows as sparse sums."""

    seconds: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, list[tuple[int, float]]]] = field(default_factory=list)

    def column(self, *, seconds: float, bytes: float, integer: bool) -> int:
        self.seconds.append(seconds)
        self.bytes.append(bytes)
        self.integer.append(integer)
        return len(self.seconds) - 1

    def row(self, lower: float, upper: float, plus: Iterable[int], minus: Iterable[int] = ()) -> None:
        """lower <= sum(plus) - sum(minus) <= upper"""
        terms: dict[int, float] = {}
        for column in plus:
            terms[column] = terms.get(column, 0.0) + 1.0
        for column in minus:
            terms[column] = terms.get(column, 0.0) - 1.0
        self.rows.append((lower, upper, sorted(terms.items())))


def solve_ilp(
    problem: Problem,
    *,
    bytes_limit: float | None = None,
    limited_gap: float = GAP_WITH_LIMIT,
    meter: Meter | None = None,
) -> Solution:
    """Minimise seconds + tie-break * bytes subject to bytes <= bytes_limit as an integer linear program.

    Variables: a binary per option of each variable (options that another one with the same rows matches in
    seconds and bytes are left out); per tensor a continuous variable per reachable state. With few
    readers a state is a joint row of all variables on the tensor; else it is (produced layout, wanted set).
    Constraints: one option each. A tensor's joint states sum, over those with a given row of a
    variable, to its options with that row (for one reader: a transport polytope, as in Alpa). Its
    (produced, wanted set) states sum to 1; those that produce p sum to the options that produce p; those whose
    set includes a mask sum to at least the options of each reader that want the mask; those whose set
    includes a layout sum to at most all options that want it: with binary options exactly the true
    state is left. One row of bytes. Objective: seconds + tie-break * bytes over all of them, scaled.
    Repeats are written out: no elimination has a part in what checks it. Tie-break: less memory.
    Gap: 1e-9 relative without a limit, `limited_gap` with one; `lower_bound` is the bound that HiGHS proved, with
    whatever gap is left when the effort of the `meter` is spent; its work is not counted.

    Raises `Infeasible` where no choice is feasible, `TooWide` where the effort is spent before there is one.
    """
    effort = (meter or Meter()).effort
    check(problem)
    expanded = expand(problem)
    encoding = Encoding(expanded.problem, effort)
    objective, lower, values = optimise(encoding.program, bytes_limit, limited_gap, effort)
    choice = expanded.layout.choice(encoding.choice(values))
    score = evaluate(problem, choice)
    assert math.isclose(score.objective, objective, rel_tol=1e-9, abs_tol=1e-18), (score.objective, objective)
    return Solution(choice=choice, score=score, lower_bound=min(lower, score.objective))


class Encoding:
    """The integer program of a problem without repeats, and how to read a choice out of its solution."""

    def __init__(self, problem: Problem, effort: Effort = EFFORT) -> None:
        self.effort = effort
        self.program = IntegerProgram()
        rows = tensor_rows(problem)
        self.options: list[dict[int, int]] = []
        for index, variable in enumerate(problem.variables):
            kept = undominated(variable.seconds, variable.bytes, [row[index] for row in rows if index in row])
            columns = {
                option: self.program.column(
                    seconds=variable.seconds[option], bytes=variable.bytes[option], integer=True
                )
                for option in kept.tolist()
            }
            self.program.row(1, 1, columns.values())
            self.options.append(columns)
        for tensor, row in zip(problem.tensors, rows, strict=True):
            self._add_tensor(tensor, row)

    def choice(self, values: Floats) -> Choice:
        return Choice(options=tuple(max(columns, key=lambda o: values[columns[o]]) for columns in self.options))

    def _classes(self, variable: int, row: list[Row]) -> dict[Row, list[int]]:
        classes: dict[Row, list[int]] = {}
        for option, column in self.options[variable].items():
            classes.setdefault(row[option], []).append(column)
        return classes

    def _add_tensor(self, tensor: Tensor, rows: dict[int, list[Row]]) -> None:
        classes = {variable: self._classes(variable, row) for variable, row in rows.items()}
        if math.prod(len(c) for c in classes.values()) <= self.effort.program_joint_states or len(classes) <= 2:
            self._add_joint(tensor, classes)
        else:
            self._add_wanted_sets(tensor, classes)

    def _add_joint(self, tensor: Tensor, classes: dict[int, dict[Row, list[int]]]) -> None:
        with_row: dict[tuple[int, Row], list[int]] = {(v, row): [] for v, c in classes.items() for row in c}
        for joint in product(*classes.values()):
            produced, wanted = reduce(united, joint)
            if produced is None or (cost := tensor.costs.get((produced, wanted))) is None:
                continue
            column = self.program.column(seconds=cost[0], bytes=cost[1], integer=False)
            for variable, row in zip(classes, joint, strict=True):
                with_row[variable, row].append(column)
        for (variable, row), columns in with_row.items():
            self.program.row(0, 0, columns, classes[variable][row])

    def _add_wanted_sets(self, tensor: Tensor, classes: dict[int, dict[Row, list[int]]]) -> None:
        reached: dict[Row, None] = {(None, 0): None}
        for rows in classes.values():
            reached = dict.fromkeys(united(before, row) for before in reached for row in rows)
        states = {
            (produced, wanted): self.program.column(seconds=cost[0], bytes=cost[1], integer=False)
            for produced, wanted in reached
            if produced is not None and (cost := tensor.costs.get((produced, wanted))) is not None
        }
        producers: dict[int, list[int]] = {}
        for (layout, _), columns in classes[tensor.producer].items():
            assert layout is not None
            producers.setdefault(layout, []).extend(columns)
        for layout, columns in producers.items():
            self.program.row(0, 0, (c for (produced, _), c in states.items() if produced == layout), columns)
        wanting: dict[int, list[int]] = {}
        for rows in classes.values():
            by_mask: dict[int, list[int]] = {}
            for (_, mask), columns in rows.items():
                by_mask.setdefault(mask, []).extend(columns)
            for mask, columns in by_mask.items():
                if mask:
                    self.program.row(0, 1, (c for (_, had), c in states.items() if mask & ~had == 0), columns)
                for layout in range(mask.bit_length()):
                    if mask >> layout & 1:
                        wanting.setdefault(layout, []).extend(columns)
        for layout, columns in wanting.items():
            self.program.row(-math.inf, 0, (c for (_, had), c in states.items() if had >> layout & 1), columns)


def optimise(
    program: IntegerProgram, bytes_limit: float | None, limited_gap: float = GAP_WITH_LIMIT, effort: Effort = EFFORT
) -> tuple[float, float, Floats]:
    """The objective and the proved lower bound, both in seconds, and the value of every column.

    Costs are scaled, since HiGHS has absolute tolerances. It may break the row of bytes by its tolerance: then
    the row is tightened by what was broken.
    """
    seconds, size = np.array(program.seconds), np.array(program.bytes)
    cost = seconds + TIE_BREAK_SECONDS_PER_BYTE * size
    gap = GAP_WITHOUT_LIMIT if bytes_limit is None else limited_gap
    result, scale = _solve(program, cost, bytes_limit, gap, effort)
    bound = -math.inf if result is None else result.best_objective_bound() / scale
    allowed = bytes_limit
    while bytes_limit is not None and allowed is not None and result is not None:
        excess = float(size @ _values(result)) - bytes_limit
        if excess <= 0:
            break
        allowed -= max(excess, 1e-12 * abs(bytes_limit))
        result, _ = _solve(program, cost, allowed, gap, effort)
    if result is None:
        result = _smallest(program, size, bytes_limit, effort)
    values = _values(result)
    return float(cost @ values), bound, values


def _smallest(program: IntegerProgram, size: Floats, bytes_limit: float | None, effort: Effort) -> mathopt.SolveResult:
    """The result with the fewest bytes, or `Infeasible` where that does not fit either."""
    smallest, _ = _solve(program, size, None, GAP_WITHOUT_LIMIT, effort)
    if smallest is None:
        raise Infeasible("no choice of options gives every tensor in the layouts that its readers want")
    needed = float(size @ _values(smallest))
    if bytes_limit is not None and needed > bytes_limit:
        raise Infeasible(f"no choice fits in {bytes_limit:.0f} bytes: the smallest needs {needed:.0f} bytes")
    return smallest


def _values(result: mathopt.SolveResult) -> Floats:
    """Column values in order. All are integers in a solution up to the solver's tolerance."""
    return np.asarray(np.rint(np.array(list(result.variable_values().values()))), dtype=np.float64)


def _solve(
    program: IntegerProgram, cost: Floats, bytes_limit: float | None, gap: float, effort: Effort
) -> tuple[mathopt.SolveResult | None, float]:
    """The result and the scale of its objective; None where infeasible. Raises `TooWide` where the effort is spent
    before there is a choice."""
    count = len(cost)
    if count > effort.program_columns:
        raise TooWide(f"the integer program has {count} columns, more than {effort.program_columns}")
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(count))
    proto.variables.lower_bounds.extend([0.0] * count)
    proto.variables.upper_bounds.extend([1.0] * count)
    proto.variables.integers.extend(program.integer)
    typical = float(np.abs(cost[cost != 0]).mean()) if np.any(cost) else 1.0
    scale = 1e3 / typical
    for column in np.flatnonzero(cost).tolist():
        proto.objective.linear_coefficients.ids.append(column)
        proto.objective.linear_coefficients.values.append(float(cost[column]) * scale)
    rows = list(program.rows)
    if bytes_limit is not None and not math.isinf(bytes_limit):
        unit = max(bytes_limit, 1.0)
        size = np.array(program.bytes) / unit
        limit = bytes_limit / unit
        rows.append((-math.inf, limit, [(c, float(size[c])) for c in np.flatnonzero(size).tolist()]))
    for index, (lower, upper, terms) in enumerate(rows):
        proto.linear_constraints.ids.append(index)
        proto.linear_constraints.lower_bounds.append(lower)
        proto.linear_constraints.upper_bounds.append(upper)
        proto.linear_constraint_matrix.row_ids.extend([index] * len(terms))
        proto.linear_constraint_matrix.column_ids.extend(c for c, _ in terms)
        proto.linear_constraint_matrix.coefficients.extend(v for _, v in terms)
    highs = highs_pb2.HighsOptionsProto()
    for name in ("mip_feasibility_tolerance", "primal_feasibility_tolerance", "dual_feasibility_tolerance"):
        highs.double_options[name] = 1e-9
    highs.int_options["mip_max_nodes"] = max(100, int(effort.program_work // max(1, count)))
    highs.int_options["simplex_iteration_limit"] = effort.program_iterations
    result = mathopt.solve(
        mathopt.Model.from_model_proto(proto),
        mathopt.SolverType.HIGHS,
        params=mathopt.SolveParameters(
            relative_gap_tolerance=gap, absolute_gap_tolerance=0.0, random_seed=1, highs=highs
        ),
    )
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return None, scale
    if reason == mathopt.TerminationReason.NO_SOLUTION_FOUND:
        raise TooWide(f"the integer program of {count} columns gave no choice within its budget")
    if reason not in (mathopt.TerminationReason.OPTIMAL, mathopt.TerminationReason.FEASIBLE):
        raise RuntimeError(f"HiGHS ended with {result.termination}")
    return result, scale
