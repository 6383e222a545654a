"""Answers questions about plans of one model: what else a site could take, and what that costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from autopar.passes.space.choices import SiteChoice
from autopar.passes.space.problem import Assignment, Decisions
from autopar.planning.account import Account, Traffic, account, sources
from autopar.planning.options import joint
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.progress import Stage
from autopar.planning.reading import request_of
from autopar.planning.steps import NEAR, QUICK
from autopar.planning.texts import grouped, short_bytes, short_seconds

from ..facts import traffic
from ..page import UNFUSED, WITHOUT_DROPOUT
from ..question import Question, Variant
from .answer import Alternative, Explanation, Replanned
from .named import Location, Named, named, places
from .telling import changes, choice_words, moved, placement_texts, verdict

CLOSE = 8
"""Alternatives that an answer shows: the others cost more as if nothing overlapped."""

EXACT_INSTRUCTIONS = 20_000
"""The most instructions of programs that are written whole for one answer; further steps are estimated."""

COMPARING = Stage(doing="comparing alternatives")

Candidate = tuple[SiteChoice, Assignment, Account]
"""A choice, the assignment with it, and its account."""


class Explainer:
    """Explains a plan with a planner of its model."""

    def __init__(self, planner: Planner, plan: Plan) -> None:
        self.planner, self.space, self.plan = planner, planner.space, plan
        self.assignment = planner.assignment(plan)
        self.before = planner.steps.account(self.assignment)

    def explain(self, name: str, *, replan: int = 0) -> Explanation:
        """As `Plan.explain`."""
        if isinstance(replan, bool) or not isinstance(replan, int) or replan < 0:
            raise ValueError(f"replan is {replan!r}: give the number of alternatives to plan again for, 0 for none")
        COMPARING.tell()
        of = named(self.space, name, self.planner.captured.tied)
        if of.kind == "collective":
            return self._collective(of)
        return self._module(of) if of.kind == "module" else self._site(of, replan)

    # ---- one site

    def _site(self, of: Named, replan: int) -> Explanation:
        (place,) = of.places
        own = list(_taken(place, self.assignment))
        choice = own[place.names.index(of.name) if of.name in place.names else 0]
        words = choice_words(self.space, place.site, choice)
        candidates = self._candidates(place, choice)
        others = self._estimated(place, candidates[:CLOSE])
        others = _shortest_policy(others) if place.site.kind == "parameter" else others
        others = _distinct(others, words)
        others.sort(key=lambda a: (a.seconds is None, a.seconds or 0.0))
        question = Question(self.planner, total=max(1, min(replan, len(others))))
        others[:replan] = [self._replanned(question, place, other) for other in others[:replan]]
        return Explanation(
            name=place.pattern if place.site.kind != "op" else place.site.name,
            kind=of.kind,
            facts=tuple(self._facts(place, own)),
            chosen=self._chosen(str(choice), words),
            alternatives=tuple(others),
            binds=tuple(verdict(self.plan, others)),
            omitted=max(0, len(candidates) - CLOSE),
        )

    def _candidates(self, place: Location, taken: SiteChoice) -> list[Candidate]:
        """All other choices that readers and makers can live with, the cheapest first."""
        site, space = place.site, self.space
        candidates = []
        for choice in joint(site, [site.choices[ranks] for ranks in space.mesh], math.inf):
            if choice == taken or space.option(site, choice) is None:
                continue
            changed = _with(place, self.assignment, choice)
            try:
                candidates.append((choice, changed, account(space, changed)))
            except ValueError:  # its readers, as they are, cannot have it
                continue
        return sorted(candidates, key=lambda item: item[2].seconds)

    def _estimated(self, place: Location, candidates: Sequence[Candidate]) -> list[Alternative]:
        """The steps and peaks of alternatives: of all by estimates, and exactly of those that seem the shortest."""
        program = self.planner.writer.written(self.assignment, self.plan.bucket_bytes)
        exact = EXACT_INSTRUCTIONS // max(1, len(program.forward) + len(program.backward))
        rough = (0.0, 0.0) if exact >= len(candidates) else self._roughly(self.assignment)

        def step(changed: Assignment) -> tuple[float, float]:
            seconds, size = self._roughly(changed)
            return self.plan.seconds + seconds - rough[0], self.plan.bytes + size - rough[1]

        steps = {}
        if exact < len(candidates):
            steps = {c[1]: step(c[1]) for c in _telling(candidates, COMPARING.part(0.0, 0.5))}
        ordered = sorted(candidates, key=lambda item: steps.get(item[1], (item[2].seconds,))[0])
        others = []
        for number, (choice, changed, costs) in enumerate(_telling(ordered, COMPARING.part(0.5 * bool(steps), 1.0))):
            is_exact = number < exact
            seconds, size = self._step(changed) if is_exact else steps[changed]
            words = choice_words(self.space, place.site, choice)
            others.append(self._alternative(str(choice), words, costs, seconds, size, is_exact=is_exact))
        return others

    def _alternative(
        self, choice: str, words: str, costs: Account, seconds: float, size: float, *, is_exact: bool = True
    ) -> Alternative:
        limit = self.plan.memory_limit_bytes
        return Alternative(
            choice=choice,
            words=words,
            seconds=seconds,
            bytes=size,
            serial_seconds=costs.seconds,
            is_exact=is_exact,
            moves=tuple(changes(self.before, costs)),
            against="does not fit the memory limit" if limit is not None and size > limit else "",
        )

    def _chosen(self, choice: str, words: str) -> Alternative:
        """What the plan itself took."""
        return self._alternative(choice, words, self.before, self.plan.seconds, self.plan.bytes)

    def _step(self, assignment: Assignment) -> tuple[float, float]:
        """The step and the peak of an assignment with the plan's buckets, as `refreshed` computes them."""
        estimate = self.planner.evaluate(assignment, **self.plan.fitted)
        return estimate.seconds, estimate.bytes

    def _roughly(self, assignment: Assignment) -> tuple[float, float]:
        """The same, estimated by a program of fewer layers: differences count, not the figures."""
        evaluate = self.planner.evaluate
        return evaluate(assignment, QUICK).seconds, evaluate(assignment, NEAR).bytes

    def _replanned(self, question: Question, place: Location, other: Alternative) -> Alternative:
        """The alternative with the plan that is pinned to it."""
        if (pins := self._pins(place, other)) is None:
            return other
        request = request_of(self.plan, constraints={place.pattern: pins}, cluster=self.planner.asked.cluster)
        found = question.answer(Variant(name="planning again", mesh=self.planner.mesh, request=request))
        if (again := found.plan) is None:
            return replace(other, replanned=Replanned(refused=found.error))
        told = Replanned(seconds=again.seconds, bytes=again.bytes, moved=tuple(moved(self.plan, again, place.names)))
        return replace(other, replanned=told)

    def _pins(self, place: Location, other: Alternative) -> dict[str, str] | None:
        """The constraints that say what an alternative places; None for an operator, which constraints can only keep
        off an axis."""
        if place.site.kind == "op":
            return None
        texts = placement_texts(self.space, place.site, other.choice)
        return {axis: text.partition("%")[0].rstrip(")") + ")" if text != "R" else "R"
                for axis, text in zip(self.space.axes, texts, strict=True)}  # fmt: skip

    def _facts(self, place: Location, own: Sequence[SiteChoice]) -> Iterator[str]:
        site = place.site
        if site.meta is not None:
            size = f"{site.meta}, {site.meta.bytes:,} bytes"
            yield size if not place.region else f"{size}, in each of {len(place.names)} layers, which change together"
        yield from _unfused([place])
        if site.fixed:
            yield "it stays replicated, since every copy of a repeated layer reads it"
        if site.node is not None:
            yield f"{site.node.op} of {place.pattern or 'the model'}, in {'backward' if site.backward else 'forward'}"
        if alone := self._alike(place):
            yield f"{', '.join(alone)} is planned on its own, and pinned too where all else is planned again"
        if len(set(own)) > 1:
            counts = {str(choice): own.count(choice) for choice in own}
            yield "its layers differ: " + ", ".join(f"{n} x {choice}" for choice, n in counts.items())
        if site.meta is not None and site.kind == "parameter":
            yield from self._not_offered(place)

    def _alike(self, place: Location) -> list[str]:
        """Other parameters that the pattern of a layer's parameter names."""
        if not place.region or place.site.kind != "parameter":
            return []
        names = (name for name in self.space.graph.parameters if name not in place.names)
        return [name for name in names if fnmatchcase(name, place.pattern)]

    def _not_offered(self, place: Location) -> Iterator[str]:
        """Dims along which a parameter cannot be split."""
        assert place.site.meta is not None
        for axis, ranks in zip(self.space.axes, self.space.mesh, strict=True):
            offered = {choice.factor for choice in place.site.choices[ranks] if choice.splits}
            lacking = [d for d in range(len(place.site.meta.shape)) if d not in offered]
            if ranks > 1 and lacking:
                dims = ", ".join(f"S({d})" for d in lacking)
                yield f"not offered on {axis} ({ranks} ranks): {dims}"

    # ---- a module

    def _module(self, of: Named) -> Explanation:
        """The choices in a module, and the module kept off each axis."""
        rows = [("in it", "choice")]
        for place in of.places:
            taken = list(dict.fromkeys(_taken(place, self.assignment)))
            label = _within(place.pattern, of.name) if place.site.kind != "op" else f"{place.site.name} ({_op(place)})"
            rows.append((label, " or ".join(choice_words(self.space, place.site, choice) for choice in taken)))
        others = []
        for number, axis in enumerate(self.space.axes):
            changed = self._kept_off(of.places, number)
            if changed == self.assignment or self.space.mesh[number] == 1:
                continue
            words = f"replicated on {axis}"
            try:
                costs = account(self.space, changed)
            except ValueError as error:
                others.append(Alternative(choice=f"{axis}=R", words=words, refused=str(error)))
                continue
            others.append(self._alternative(f"{axis}=R", words, costs, *self._step(changed)))
        return Explanation(
            name=of.name,
            kind="module",
            facts=(f"{len(of.places)} places of decision", *_unfused(of.places)),
            chosen=self._chosen("", "as it is"),
            alternatives=tuple(others),
            binds=tuple(verdict(self.plan, others)),
            rows=tuple(rows),
        )

    def _kept_off(self, places: Sequence[Location], axis: int) -> Assignment:
        """The assignment with every place replicated on an axis, where that is legal."""
        assignment = self.assignment
        for place in places:
            for choice in dict.fromkeys(_taken(place, assignment)):
                off = choice.on(axis, self.space.replicated(place.site).axes[axis])
                if off != choice and self.space.option(place.site, off) is not None:
                    assignment = _with(place, assignment, off, instead_of=choice)
        return assignment

    # ---- a collective

    def _collective(self, of: Named) -> Explanation:
        """What the collectives of a kind, or on an axis, move: the tensors with the most seconds."""
        (kind, axis), every = of.collective, sources(self.space, self.assignment)
        found = sorted((s for s in every if kind in ("", s.kind) and axis in ("", s.axis)), key=lambda s: -s.seconds)
        if not found:
            return _none_of(of, every)
        names = {place.site.name: place.pattern for place in places(self.space) if place.site.kind != "op"}
        return Explanation(
            name=of.name,
            kind="collective",
            facts=tuple(_traffic(self.plan, kind, axis)),
            rows=(
                ("what travels", "collective", "count", "bytes", "alone"),
                *(_source_row(source, names) for source in found[:CLOSE]),
            ),
            omitted=max(0, len(found) - CLOSE),
        )


def _telling(candidates: Sequence[Candidate], stage: Stage) -> Iterator[Candidate]:
    """The candidates, equal parts of a stage."""
    return (candidate for candidate, _ in zip(candidates, stage.parts(len(candidates)), strict=True))


def _none_of(of: Named, every: Sequence[Traffic]) -> Explanation:
    """Of collectives that the plan does not have."""
    others = ", ".join(sorted({f"{s.kind} {s.axis}" for s in every})) or "no collective at all"
    return Explanation(name=of.name, kind="collective", facts=(f"nothing; the plan has {others}",))


def _source_row(source: Traffic, names: Mapping[str, str]) -> tuple[str, ...]:
    size, seconds = short_bytes(source.bytes), short_seconds(source.seconds)
    name = names.get(source.root) or f"{source.root} of {source.module}"
    return name, f"{source.kind} {source.axis}", f"{source.count:,}", size, seconds


def _unfused(places: Sequence[Location]) -> list[str]:
    """What is to be said where an operator's kernel is not fused."""
    rules = [place.site.rule for place in places if place.site.rule is not None]
    return [f"{UNFUSED}: {WITHOUT_DROPOUT}"] if any(rule.inside_bytes for rule in rules) else []


def _within(name: str, module: str) -> str:
    """The end of a name within a module, one of whose copies is asked for."""
    return ".".join(name.split(".")[len(module.split(".")) :])


def _op(place: Location) -> str:
    return place.site.node.op.removesuffix(".default") if place.site.node is not None else place.site.kind


def _taken(place: Location, assignment: Assignment) -> Iterator[SiteChoice]:
    """What a place takes, in each copy."""
    yield from (decisions[place.site.name] for decisions in _regions(assignment)[place.region])


def _regions(assignment: Assignment) -> list[tuple[Decisions, ...]]:
    """The decisions of each region, one for each copy of it."""
    return [(assignment.rest,), *assignment.copies]


def _with(
    place: Location, assignment: Assignment, choice: SiteChoice, instead_of: SiteChoice | None = None
) -> Assignment:
    """The assignment with another choice in one place, in all copies (or in those that take `instead_of`)."""
    name = place.site.name

    def changed(decisions: Decisions) -> Mapping[str, SiteChoice]:
        return {**decisions, name: choice} if instead_of in (None, decisions[name]) else decisions

    regions = _regions(assignment)
    regions[place.region] = tuple(map(changed, regions[place.region]))
    (rest,), *copies = regions
    return replace(assignment, rest=rest, copies=tuple(copies))


def _distinct(others: list[Alternative], taken: str) -> list[Alternative]:
    """Alternatives whose words are those of another one, or of what is taken, with their choice as in the plan's
    file."""
    counts = Counter([taken, *(other.words for other in others)])
    return [
        replace(other, words=f"{other.words} [{other.choice}]") if counts[other.words] > 1 else other
        for other in others
    ]


def _shortest_policy(others: list[Alternative]) -> list[Alternative]:
    """Of alternatives that differ in whether gathered weights are kept: the one with the shorter step, and the other
    one if it needs less memory."""
    result = []
    for same in grouped((other.choice.rsplit(" ", 1)[0], other) for other in others).values():
        first, *rest = sorted(same, key=lambda a: (a.seconds or 0.0, a.bytes or 0.0))
        result += [first, *(a for a in rest if (a.bytes or 0.0) < (first.bytes or 0.0))]
    return result


def _traffic(plan: Plan, kind: str, axis: str) -> Iterator[str]:
    for row in traffic(plan):
        if (not kind or row.kind == kind) and (not axis or row.axis == axis):
            hidden = row.hidden_seconds / row.seconds if row.seconds else 0.0
            yield (
                f"{row.count:,} {row.kind} on {row.axis}: {short_seconds(row.seconds)} a step, of which {hidden:.0%} "
                f"overlap with computation"
            )
