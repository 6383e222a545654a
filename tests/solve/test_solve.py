"""The solvers agree with one another, with the evaluator, and say what they do not know."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solve import ilp, relax
from autopar.solve.dp import solve_relaxed
from autopar.solve.effort import EFFORT, Effort, Meter
from autopar.solve.elimination import eliminate, schedule
from autopar.solve.exhaustive import MAX_COMBINATIONS
from autopar.solve.expand import expand
from autopar.solve.flat import Flat, flattened
from autopar.solve.network import Leads, network
from autopar.solve.pricing import Library, Pricing
from autopar.solve.problem import (
    TIE_BREAK_SECONDS_PER_BYTE,
    Choice,
    Infeasible,
    Problem,
    Repeat,
    Solution,
    Tensor,
    Variable,
    evaluate,
    in_runs,
)
from autopar.solve.relax import Relaxation
from autopar.solve.solvers import SOLVERS, TooWide, solve

EXACT = [name for name, solver in SOLVERS.items() if solver.exact]


def variable(name: str, *costs: tuple[float, float]) -> Variable:
    return Variable(
        name=name,
        options=tuple(f"option {i}" for i in range(len(costs))),
        seconds=tuple(c[0] for c in costs),
        bytes=tuple(c[1] for c in costs),
    )


def random_problem(
    rng: random.Random, *, depth: int = 1, most: int = 6, blocked: float = 0.05, border: int = 0
) -> Problem:
    """2 to `most` variables of 1 to 4 options, tensors with 1 to 4 readers, some states blocked, repeats of 1 to 3.

    With `border` > 0 the first two variables are a border with that many options.
    """
    count = rng.randint(2, most)
    sizes = [rng.randint(1, 4) for _ in range(count)]
    if border:
        sizes[:2] = [border, border]
    variables = tuple(
        variable(f"v{i}", *((rng.random(), float(rng.randint(0, 100))) for _ in range(size)))
        for i, size in enumerate(sizes)
    )
    tensors = []
    for t in range(rng.randint(1, count)):
        producer = rng.randrange(count)
        readers = rng.sample(range(count), min(count, rng.randint(1, 4)))
        tensors.append(
            Tensor(
                name=f"t{t}",
                producer=producer,
                produced=tuple(rng.randrange(3) for _ in range(sizes[producer])),
                consumers=tuple(readers),
                wanted=tuple(tuple(rng.choice((0, 1, 2, 3, 4)) for _ in range(sizes[r])) for r in readers),
                costs={
                    (made, wanted): (rng.random(), float(rng.randint(0, 30)))
                    for made in range(3)
                    for wanted in range(8)
                    if rng.random() >= blocked
                },
            )
        )
    repeats = []
    if depth and rng.random() < 0.7:
        left = rng.randrange(count)
        right = rng.choice([v for v in range(count) if sizes[v] == sizes[left]])
        borders = rng.choice(((0, 1), (1, 0), (0, 0)))
        repeats.append(
            Repeat(
                name="layers",
                body=random_problem(rng, depth=depth - 1, most=4, blocked=blocked, border=sizes[left]),
                count=rng.randint(1, 3),
                left=(left,),
                right=(right,),
                body_left=borders[:1],
                body_right=borders[1:],
            )
        )
    return Problem(variables=variables, tensors=tuple(tensors), repeats=tuple(repeats))


def outcome(problem: Problem, solver: str, bytes_limit: float | None = None, effort: Effort = EFFORT) -> Solution | str:
    try:
        solution = solve(problem, solver, bytes_limit=bytes_limit, meter=Meter(effort=effort))
    except Infeasible as error:
        return str(error)
    assert evaluate(problem, solution.choice) == solution.score
    assert solution.solver == solver
    assert solution.lower_bound <= solution.score.objective
    assert bytes_limit is None or solution.score.bytes <= bytes_limit
    return solution


def assert_all_agree(problem: Problem, bytes_limit: float | None = None, effort: Effort = EFFORT) -> Solution | str:
    oracle = outcome(problem, "exhaustive", bytes_limit)
    dp, integer = (outcome(problem, solver, bytes_limit, effort) for solver in ("dp", "ilp"))
    if isinstance(oracle, str):
        assert dp == oracle
        assert integer == oracle
        return oracle
    assert isinstance(dp, Solution)
    assert isinstance(integer, Solution)
    best = oracle.score.objective
    tolerance = 1e-9 if bytes_limit is None else 1.001 * ilp.GAP_WITH_LIMIT
    assert integer.score.objective == pytest.approx(best, rel=tolerance)
    assert max(dp.lower_bound, integer.lower_bound) <= best * (1 + 1e-9)
    assert dp.gap == 0, "problems this small are solved exactly"
    assert dp.score.objective == pytest.approx(best, rel=1e-9)
    return oracle


@pytest.mark.parametrize("seed", range(50))
def test_the_three_solvers_agree(seed: int) -> None:
    problem = random_problem(random.Random(seed), depth=1 + seed % 2, blocked=0.15 if seed % 5 == 0 else 0.02)
    best = assert_all_agree(problem)
    if isinstance(best, Solution):
        for fraction in (0.9, 0.6):
            assert_all_agree(problem, best.score.bytes * fraction)


@pytest.mark.parametrize("seed", range(0, 50, 5))
@pytest.mark.parametrize(("setting", "most"), [("program_joint_states", 0), ("border_states", 2)])
def test_every_form_of_a_problem_agrees(seed: int, setting: str, most: int) -> None:
    """(Produced, wanted set) states of an integer program instead of joint ones; copies that meet in three states or
    more written out, within others too."""
    effort = Effort(**{setting: most})
    problem = random_problem(random.Random(seed), depth=2)
    best = assert_all_agree(problem, effort=effort)
    if isinstance(best, Solution):
        assert_all_agree(problem, best.score.bytes * 0.8, effort)


@pytest.mark.parametrize("narrow", [0, 32, 4096])
def test_messages_bound_what_is_too_wide_to_eliminate(narrow: int) -> None:
    """Hardly any node is eliminated first, and states near the bound only in tables of `narrow` entries: with 0 of them
    every choice is one of node after node."""
    sweeps = (0, 1, 2, *EFFORT.message_sweeps)  # tables that do not agree on any state at first
    effort = Effort(message_small_entries=4, message_narrow_entries=narrow, message_sweeps=sweeps)
    over = []
    for seed in range(60):
        problem = random_problem(random.Random(seed), depth=2, most=9, blocked=0.02)
        try:
            best = solve(problem, "dp").score.objective
            choice, bound = relax.relaxed(problem, (1.0, TIE_BREAK_SECONDS_PER_BYTE), Library(Meter(effort=effort)))
        except (Infeasible, TooWide):
            continue
        assert bound <= best * (1 + 1e-9), "a bound that some choice breaks is none"
        over.append(evaluate(problem, choice).objective / best)
    assert len(over) >= 40 and min(over) >= 1 - 1e-9
    assert sum(o <= 1 + relax.STANDING_GAP for o in over) >= 0.9 * len(over)


def test_messages_tell_small_differences_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nearly all of the cost is the same for every choice, all states lie near the bound, as a share of it."""
    effort = Effort(message_small_entries=4, message_narrow_entries=64)
    monkeypatch.setattr(Relaxation, "rounded", lambda self: np.zeros((len(self.nodes), 1), dtype=np.int64))
    weights = (1.0, TIE_BREAK_SECONDS_PER_BYTE)
    found = 0
    for seed in range(20):
        problem = random_problem(random.Random(seed), depth=0, most=40, blocked=0.0)
        first, *others = problem.variables
        much = 1e4 * solve(problem, "dp").score.objective
        heavy = dataclasses.replace(first, seconds=tuple(much + s for s in first.seconds))
        problem = dataclasses.replace(problem, variables=(heavy, *others))
        choice, _ = relax.relaxed(problem, weights, Library(Meter(effort=effort)))
        best = solve(problem, "dp").score.objective - much
        found += evaluate(problem, choice).objective - much <= best * (1 + relax.STANDING_GAP)
    assert found >= 18


def cheapest(flat: Flat) -> tuple[float, Choice]:
    dense = [(nodes, costs.costs if isinstance(costs, Leads) else costs) for nodes, costs in flat.factors]
    plan = schedule(flat.sizes, tuple(nodes for nodes, _ in dense), ())
    result = eliminate(plan, [costs for _, costs in dense])
    states = result.states(np.zeros((0, 1), dtype=np.int64))
    return float(result.table), flat.choices(states)[0]


@pytest.mark.parametrize("most", [1, 30, 10**9])
@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_written_out_as_tables_has_the_same_optimum(most: int, depth: int) -> None:
    """However many nodes are eliminated in the bodies, and in what is made of their copies."""
    solved = 0
    for seed in range(40):
        problem = random_problem(random.Random(seed), depth=depth, most=5, blocked=0.05)
        least, choice = cheapest(flattened(problem, (1.0, TIE_BREAK_SECONDS_PER_BYTE), Library(), most=most))
        try:
            best = solve(problem, "dp").score.objective
        except Infeasible:
            assert math.isinf(least)
            continue
        assert least == pytest.approx(best, rel=1e-9) == evaluate(problem, choice).objective
        solved += 1
    assert solved >= 20


@pytest.mark.parametrize("count", [7, 8, 13, 40])
def test_a_folded_repeat_costs_what_it_does_written_out(count: int) -> None:
    """Two copies at each end choose for themselves, and a pair between them comes again and again; what cannot be a
    pair is a copy more."""
    over = []
    for seed in range(15):
        short = random_problem(random.Random(seed), depth=2, most=5, blocked=0.0)
        problem = dataclasses.replace(
            short, repeats=tuple(dataclasses.replace(repeat, count=count) for repeat in short.repeats)
        )
        flat = flattened(problem, (1.0, TIE_BREAK_SECONDS_PER_BYTE), Library(), most=100, folded=True)
        least, choice = cheapest(flat)
        assert evaluate(problem, choice).objective == pytest.approx(least)
        assert all(len({id(copy) for copy in copies}) <= min(count, 7) for copies in choice.repeats)
        over.append(least / solve(problem, "dp").score.objective)
    assert min(over) >= 1 - 1e-9
    assert sum(o <= 1 + 1e-9 for o in over) >= 0.9 * len(over) and max(over) <= 1.01


def test_without_a_bound_what_is_too_wide_is_solved_folded() -> None:
    """As well as written out, and nothing is claimed about it."""
    problem = random_problem(random.Random(3), depth=2, most=9, blocked=0.0)
    problem = dataclasses.replace(problem, repeats=tuple(dataclasses.replace(r, count=20) for r in problem.repeats))
    exact = solve(problem, "dp").score.objective
    meter = Meter(effort=Effort(table_entries=Library().largest(problem) - 1))
    bounded, quick = (solve(problem, "dp", bounded=bounded, meter=meter) for bounded in (True, False))
    assert problem.repeats and exact <= quick.score.objective * (1 + 1e-9)
    assert quick.score.objective <= bounded.score.objective * (1 + relax.STANDING_GAP)
    assert quick.lower_bound == 0.0 < bounded.lower_bound


def test_copies_that_meet_in_many_states_are_written_out_or_folded() -> None:
    """Six borders of five options are 15,625 states: a matrix over them would fill the memory."""
    rng, sides = random.Random(0), (tuple(range(6)), tuple(range(6, 12)))
    border = variable("border", *((0.0, 0.0),) * 5)

    def tensor(producer: int, *readers: int) -> Tensor:
        states = [(made, union) for made in range(5) for union in range(32)]
        return Tensor(
            name="t",
            producer=producer,
            produced=tuple(range(5)),
            consumers=readers,
            wanted=((1, 2, 4, 8, 16),) * len(readers),
            costs={state: (rng.random(), 0.0) for state in states},
        )

    body = Problem(variables=(border,) * 12, tensors=tuple(tensor(v, v + 6, (v + 1) % 6) for v in range(6)))
    repeat = Repeat(
        name="layers", body=body, count=9, left=sides[0], right=sides[1], body_left=sides[0], body_right=sides[1]
    )
    problem = Problem(variables=(border,) * 12, tensors=(tensor(0, 1),), repeats=(repeat,))
    written = solve(problem, "dp")
    assert written.gap <= relax.STANDING_GAP
    folded = solve(problem, "dp", bounded=False, meter=Meter(effort=Effort(written_options=0)))
    assert written.lower_bound <= folded.score.objective * (1 + 1e-9)
    with pytest.raises(TooWide, match="copies of layers meet in 15625 states"):
        solve(problem, "dp", bytes_limit=-1.0, meter=Meter(effort=Effort(written_options=0)))


def test_the_dynamic_program_says_the_gap_of_what_it_cannot_eliminate() -> None:
    """A random problem, told that its widest table is too large."""
    rng = random.Random(3)
    problem = random_problem(rng, depth=1, most=40, blocked=0.0)
    exact = solve(problem, "dp")
    widest = Library().largest(problem)
    meter = Meter(effort=Effort(table_entries=widest - 1))
    wide = solve(problem, "dp", meter=meter)
    assert wide.score == evaluate(problem, wide.choice)
    assert wide.lower_bound <= exact.score.objective * (1 + 1e-9) <= wide.score.objective * (1 + 2e-9)
    assert wide.gap <= relax.STANDING_GAP
    with pytest.raises(TooWide):
        solve(problem, "dp", bytes_limit=exact.score.bytes * 0.9, meter=meter)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(min_value=0), st.floats(min_value=0.3, max_value=1.0), st.booleans())
def test_no_choice_beats_the_optimum(seed: int, fraction: float, limited: bool) -> None:
    """Any choice that hypothesis draws costs at least the lower bound."""
    rng = random.Random(seed)
    problem = random_problem(rng, depth=0)
    best = outcome(problem, "dp")
    if isinstance(best, str):
        return
    limit = best.score.bytes * fraction if limited else None
    solution = outcome(problem, "dp", limit)
    for _ in range(50):
        choice = Choice(options=tuple(rng.randrange(len(v.options)) for v in problem.variables))
        try:
            score = evaluate(problem, choice)
        except Infeasible:
            continue
        if limit is None or score.bytes <= limit:
            assert isinstance(solution, Solution)
            assert score.objective >= solution.lower_bound * (1 - 1e-12)


def test_a_layout_that_two_readers_want_is_paid_once() -> None:
    """Both readers want layout 1: the union costs 3, not 6, so wanting it twice beats wanting nothing for 2 each."""
    reader = variable("reader", (0.0, 0.0), (2.0, 0.0))
    problem = Problem(
        variables=(variable("producer", (0.0, 0.0)), reader, reader),
        tensors=(
            Tensor(
                name="x",
                producer=0,
                produced=(0,),
                consumers=(1, 2),
                wanted=((2, 0), (2, 0)),
                costs={(0, 0): (0.0, 0.0), (0, 2): (3.0, 0.0)},
            ),
        ),
    )
    for solver in EXACT:
        solution = solve(problem, solver)
        assert solution.choice.options == (0, 0, 0)
        assert solution.score.seconds == pytest.approx(3.0)


def many_readers() -> Problem:
    rng = random.Random(3)
    readers = tuple(range(1, 9))
    return Problem(
        variables=tuple(variable(f"v{i}", *((rng.random(), 0.0) for _ in range(3))) for i in range(9)),
        tensors=(
            Tensor(
                name="x",
                producer=0,
                produced=(0, 1, 2),
                consumers=readers,
                wanted=tuple(tuple(rng.sample((1, 2, 4), 3)) for _ in readers),
                costs={(p, w): (rng.random() * 4, 1.0) for p in range(3) for w in range(8) if rng.random() < 0.9},
            ),
        ),
    )


def test_a_tensor_with_many_readers_is_a_chain_of_accumulators() -> None:
    problem = many_readers()
    assert max(table.priced((1.0, 1.0)).size for _, table in network(problem, ()).tables) < 3**9 / 50
    assert_all_agree(problem)


def test_a_tensor_whose_table_is_too_large_is_left_to_who_needs_none() -> None:
    """Rather than all memory being taken."""
    problem = many_readers()
    exact = solve(problem, "dp").score.objective
    widest = max(table.priced((1.0, 1.0)).size for _, table in network(problem, ()).tables)
    meter = Meter(effort=Effort(tensor_entries=widest - 1))
    with pytest.raises(
        TooWide, match=f"a tensor would need a table of .* entries, more than {widest - 1}: use the ilp"
    ):
        solve(problem, "dp", meter=meter)
    assert solve(problem, "ilp", meter=meter).score.objective == pytest.approx(exact)


def test_a_group_may_read_what_it_makes() -> None:
    problem = Problem(
        variables=(variable("group", (1.0, 0.0), (0.5, 0.0), (0.0, 0.0)),),
        tensors=(
            Tensor(
                name="x",
                producer=0,
                produced=(0, 1, 1),
                consumers=(0, 0),
                wanted=((1, 1, 2), (0, 2, 0)),
                costs={(0, 1): (0.0, 0.0), (1, 3): (0.2, 0.0)},
            ),
        ),
    )
    best = assert_all_agree(problem)
    assert isinstance(best, Solution)
    assert best.choice.options == (1,)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("limited", [False, True])
def test_branching_changes_no_optimum(seed: int, limited: bool) -> None:
    """Neither on a variable of the problem nor on one of a body that repeats."""
    rng = random.Random(seed)
    plain = random_problem(rng)
    limit = None
    if limited and isinstance(free := outcome(plain, "exhaustive"), Solution):
        limit = 0.8 * free.score.bytes
    repeats = tuple(replace(r, body=_branching(r.body, rng, (*r.body_left, *r.body_right))) for r in plain.repeats)
    kept = {v for r in plain.repeats for v in (*r.left, *r.right)}
    branching = _branching(replace(plain, repeats=repeats), rng, kept)
    best, found = outcome(plain, "exhaustive", limit), outcome(branching, "dp", limit)
    if isinstance(best, Solution):
        assert isinstance(found, Solution)
        assert found.score.objective == pytest.approx(best.score.objective, rel=1e-9)
        assert evaluate(plain, found.choice) == found.score
    else:
        assert isinstance(found, str)


def _branching(problem: Problem, rng: random.Random, kept: Collection[int]) -> Problem:
    """On a variable that no border shows, if there is one."""
    inner = [v for v in range(len(problem.variables)) if v not in kept]
    return replace(problem, branch=rng.choice(inner) if inner else None)


def infeasible_problem() -> Problem:
    return Problem(
        variables=(variable("a", (1.0, 1.0)), variable("b", (1.0, 1.0), (2.0, 1.0))),
        tensors=(
            Tensor(name="x", producer=0, produced=(0,), consumers=(1,), wanted=((1, 2),), costs={(1, 1): (0.0, 0.0)}),
        ),
    )


@pytest.mark.parametrize("solver", SOLVERS)
def test_what_cannot_be_joined_is_infeasible(solver: str) -> None:
    with pytest.raises(Infeasible, match="no choice of options gives every tensor"):
        solve(infeasible_problem(), solver)
    with pytest.raises(Infeasible, match="no choice of options gives every tensor"):
        solve(infeasible_problem(), solver, bytes_limit=1.0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_limit_that_nothing_fits_names_the_smallest(solver: str) -> None:
    problem = chain(layers=4)
    with pytest.raises(Infeasible, match=r"no choice fits in 39 bytes: the smallest needs 40 bytes"):
        solve(problem, solver, bytes_limit=39)
    assert solve(problem, solver, bytes_limit=40).score.bytes == 40


def test_bad_input_says_what_to_change() -> None:
    with pytest.raises(ValueError, match="unknown solver 'simplex'; known: auto, dp, ilp, exhaustive"):
        solve(chain(layers=2), "simplex")
    wide = Problem(variables=tuple(variable(f"v{i}", (0.0, 0.0), (1.0, 0.0)) for i in range(30)))
    with pytest.raises(ValueError, match=f"at most {MAX_COMBINATIONS}: use dp or ilp"):
        solve(wide, "exhaustive")
    (repeat,) = chain(layers=2).repeats
    torn = dataclasses.replace(chain(layers=2), repeats=(dataclasses.replace(repeat, body_right=()),))
    other = dataclasses.replace(chain(layers=2), variables=(variable("in", (0.0, 0.0), (0.0, 0.0)),) * 2)
    for solver in SOLVERS:
        with pytest.raises(ValueError, match="must name equally many variables"):
            solve(torn, solver)
        with pytest.raises(ValueError, match="must be the same ones"):
            solve(other, solver)


def chain(*, layers: int) -> Problem:
    """Layers that are fast and fat (1 s, 30 bytes) or slow and thin (2 s, 10 bytes), one layout between them."""
    border = variable("border", (0.0, 0.0))
    body = Problem(variables=(border, variable("layer", (1.0, 30.0), (2.0, 10.0)), border))
    repeat = Repeat(name="layers", body=body, count=layers, left=(0,), right=(1,), body_left=(0,), body_right=(2,))
    return Problem(variables=(border, border), repeats=(repeat,))


@pytest.mark.parametrize("solver", EXACT)
@pytest.mark.parametrize(("limit", "fat"), [(360, 12), (359, 11), (240, 6), (259, 6), (139, 0), (120, 0)])
def test_identical_layers_mix_under_a_memory_limit(solver: str, limit: float, fat: int) -> None:
    solution = solve(chain(layers=12), solver, bytes_limit=limit)
    assert sum(copy.options[1] == 0 for copy in solution.choice.repeats[0]) == fat
    assert solution.score.seconds == fat * 1.0 + (12 - fat) * 2.0


@pytest.mark.parametrize("seed", range(20))
def test_copies_alike_stand_in_a_row_at_the_same_score(seed: int) -> None:
    rng = random.Random(seed)
    problem = layered(count=24, ops=3)
    (repeat,) = problem.repeats
    states = rng.choices(range(2), k=repeat.count + 1)
    copies = [Choice(options=(left, *rng.choices(range(2), k=3), right)) for left, right in itertools.pairwise(states)]
    mixed = Choice(options=(states[0], states[-1], 0), repeats=(tuple(copies),))
    ordered = in_runs(problem, mixed)
    assert evaluate(problem, ordered).seconds == pytest.approx(evaluate(problem, mixed).seconds, rel=1e-12)
    assert Counter(ordered.repeats[0]) == Counter(copies)
    runs = [copy for copy, _ in itertools.groupby(ordered.repeats[0])]
    kept = [copy for copy in runs if copy.options[0] == copy.options[-1]]
    assert len(kept) == len(set(kept)) and len(runs) < len(copies)


def layered(*, count: int, ops: int = 20, layouts: int = 3, seed: int = 0) -> Problem:
    """A body of `ops` ops in a row with residual connections; its border has `layouts` options."""
    rng = random.Random(seed)
    border = variable("border", *((0.0, 0.0),) * layouts)
    body_ops = tuple(
        variable(f"op{i}", *((rng.random() * 1e-3, float(rng.randint(0, 10**8))) for _ in range(3))) for i in range(ops)
    )

    def tensor(producer: int, readers: tuple[int, ...], counts: list[int]) -> Tensor:
        return Tensor(
            name=f"t{producer}",
            producer=producer,
            produced=tuple(rng.randrange(layouts) for _ in range(counts[producer])),
            consumers=readers,
            wanted=tuple(tuple(1 << rng.randrange(layouts) for _ in range(counts[r])) for r in readers),
            costs={
                (made, wanted): (rng.random() * 1e-4 * (wanted & ~(1 << made)).bit_count(), 1e6 * wanted.bit_count())
                for made in range(layouts)
                for wanted in range(1 << layouts)
            },
        )

    counts = [layouts, *(3,) * ops, layouts]
    readers = [(i + 1, i + 5) if i % 4 == 0 and i + 5 <= ops else (i + 1,) for i in range(ops + 1)]
    body = Problem(
        variables=(border, *body_ops, border),
        tensors=tuple(tensor(i, readers[i], counts) for i in range(ops + 1)),
    )
    head = tensor(2, (0,), [layouts, layouts, 2])
    return Problem(
        variables=(border, border, variable("head", (1e-3, 1e9), (2e-3, 1e8))),
        tensors=(head,),
        repeats=(
            Repeat(name="layers", body=body, count=count, left=(0,), right=(1,), body_left=(0,), body_right=(ops + 1,)),
        ),
    )


def test_depth_costs_its_logarithm() -> None:
    products = {}
    for count in (2, 30, 1000):
        problem = layered(count=count)
        pricing = Pricing(Library(), (1.0, TIE_BREAK_SECONDS_PER_BYTE))
        objective = float(pricing.table(problem, ()))
        assert solve(problem).score.objective == pytest.approx(objective, rel=1e-9)
        products[count] = pricing.powers(problem.repeats[0]).products
        assert len({id(copy) for copy in solve(problem).choice.repeats[0]}) <= 9, "equal copies are one object"
    assert products == {2: 1, 30: 4 + 3, 1000: 9 + 5}


def test_repeats_of_one_body_share_its_powers() -> None:
    (repeat,) = layered(count=8).repeats
    problem = layered(count=8)
    twice = dataclasses.replace(problem, repeats=(repeat, dataclasses.replace(repeat, left=(1,), right=(0,))))
    pricing = Pricing(Library(), (1.0, 0.0))
    pricing.table(twice, ())
    assert pricing.powers(repeat).products == 3


@pytest.mark.parametrize("count", [1, 2, 30])
def test_a_repeat_equals_its_copies_written_out(count: int) -> None:
    problem = layered(count=count)
    expanded = expand(problem)
    flat, deep = solve(expanded.problem), solve(problem)
    assert not expanded.problem.repeats
    assert deep.score.objective == pytest.approx(flat.score.objective, rel=1e-9)
    decoded = evaluate(problem, expanded.layout.choice(flat.choice))
    assert decoded.objective == pytest.approx(flat.score.objective, rel=1e-9)
    assert solve(problem, "ilp").score.objective == pytest.approx(flat.score.objective, rel=1e-9)


def test_a_deep_problem_under_a_limit_is_within_its_stated_gap() -> None:
    problem = layered(count=32)
    free = solve(problem)
    limit = 0.8 * free.score.bytes
    dp, integer = solve(problem, bytes_limit=limit), solve(problem, "ilp", bytes_limit=limit)
    assert max(dp.score.bytes, integer.score.bytes) <= limit
    assert dp.gap <= 1e-3
    assert max(dp.lower_bound, integer.lower_bound) <= min(dp.score.objective, integer.score.objective)
    assert free.score.objective < dp.score.objective
    assert integer.score.objective == pytest.approx(dp.score.objective, rel=1e-3)


@pytest.mark.parametrize("seed", range(30))
def test_messages_answer_without_any_work_left(seed: int) -> None:
    """Node after node takes what is cheapest beside those before it; a limit is kept, and the bound is honest."""
    problem = random_problem(random.Random(seed), depth=1 + seed % 2, blocked=0.02)
    best = outcome(problem, "dp")
    effort = Effort(message_small_entries=4, message_narrow_entries=0)
    if isinstance(best, str):
        return
    limit = 0.9 * best.score.bytes
    within = outcome(problem, "dp", limit)
    for bytes_limit, least in ((None, best), (limit, within)):
        if isinstance(least, str):
            continue
        for bounded in (True, False):
            library = Library(Meter(most=0.0, effort=effort))
            found = solve_relaxed(problem, library, bytes_limit=bytes_limit, bounded=bounded)
            assert found.score == evaluate(problem, found.choice)
            assert found.lower_bound <= least.score.objective * (1 + 1e-9) <= found.score.objective * (1 + 2e-9)
            assert bytes_limit is None or found.score.bytes <= bytes_limit


def test_ties_go_to_less_memory_and_then_to_the_first_option() -> None:
    problem = Problem(variables=(variable("v", (1.0, 5e9), (1.0, 1e9), (1.0, 1e9)),))
    for solver in SOLVERS:
        assert solve(problem, solver).choice.options == (1,)


def through_a_file(problem: Problem) -> Problem:
    """Its types are all that reading takes."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(problem), type=Problem)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_same_problem_gives_the_same_choice(solver: str) -> None:
    problem = random_problem(random.Random(11), depth=2)
    first = solve(problem, solver)
    again = solve(through_a_file(problem), solver)
    assert (first.choice, first.score, first.lower_bound) == (again.choice, again.score, again.lower_bound)
    limit = 0.9 * first.score.bytes
    assert outcome_text(problem, solver, limit) == outcome_text(problem, solver, limit)


def outcome_text(problem: Problem, solver: str, bytes_limit: float) -> str:
    result = outcome(problem, solver, bytes_limit)
    return result if isinstance(result, str) else f"{result.choice} {result.score} {result.lower_bound}"


@pytest.mark.parametrize("seed", range(5))
def test_a_problem_survives_a_file(seed: int) -> None:
    problem = random_problem(random.Random(seed), depth=2)
    told = through_a_file(problem)
    assert (told, str(told)) == (problem, str(problem))


def test_an_empty_problem_costs_nothing() -> None:
    for solver in SOLVERS:
        solution = solve(Problem(variables=()), solver, bytes_limit=math.inf)
        assert (solution.score.objective, solution.gap) == (0.0, 0.0)
