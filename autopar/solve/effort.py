"""Effort: how far solves and searches go before they give the best answer that they have.

It is counted in work and not in seconds: the same inputs give the same plan on any machine. Where a person gives
seconds, a search ends with the best that it has by then.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace

from .work import Limits, Work

ELIMINATED_WORK = 2.0
"""Work of an entry of an eliminated table: several tables are added up for it."""

VISIT_WORK = 16_000.0
"""Work of a visit to a table besides that on its entries: some 8 microseconds, however small it is."""


@dataclass(slots=True, eq=False)
class Deadline:
    """When a search ends with the best that it has: at a time of `time.monotonic()`, as soon as its `end` is called, or
    with the `outer` search that it is part of."""

    at: float = math.inf
    outer: Deadline | None = None

    def end(self) -> None:
        self.at = -math.inf

    def sooner(self, seconds: float) -> Deadline:
        """So many seconds from now, unless this one comes first."""
        return Deadline(time.monotonic() + seconds, self)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.at or (self.outer is not None and self.outer.is_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort(Limits):
    """Every threshold of a search. A part that has spent its share of the work answers with the best that it has; one
    that has nothing yet gets a choice by the cheapest way of solving. Each part has its share alone, whatever the
    others leave, so that an answer does not depend on which part comes first, or in which process.
    """

    # ---- one solve: what is spent ends one way of solving and begins the next, cheaper one
    border_states: int = 256
    """In which copies of a repeat may meet: matrices over more take longer than all copies written out."""
    product_sums: float = 5e8
    """In the products of the matrix of a repeat: about a second of one core."""
    written_options: int = 20_000
    """Of all copies of a problem: up to so many, those that meet in more states are written out, and messages pass
    through all of them where no choice with a repeated middle is found."""
    message_entries: float = 1e9
    """Of all tables that message passing goes through, each time that it does, once for each of their nodes."""
    message_sweeps: tuple[int, ...] = (5, 10, 25, 40, 80, 160)
    """Sweeps of message passing before a choice is looked for, time after time."""
    message_small_entries: int = 200_000
    """Nodes whose elimination makes smaller tables are eliminated before messages pass."""
    message_narrow_entries: int = 30_000_000
    """Of all tables of what is left near the bound: that is eliminated."""
    program_columns: int = 500_000
    """Of an integer program, in which all copies are written out: 32 layers of Llama take up to 180,000, and 80 of them
    450,000."""
    program_work: float = 2e7
    """Columns times nodes of branch and bound."""
    program_iterations: int = 1_000_000
    """Of the simplex method."""
    program_joint_states: int = 128
    """A tensor with fewer joint states of all its readers has a variable for each in the integer program."""

    # ---- one search: its work, in table entries that are read, and the shares of its parts
    work: float = 1.5e10
    """Of all parts: some 8 seconds of one core, of which usual models need a third."""
    descents: float = 0.4
    """The descent, or the whole as one problem, where it is no more."""
    limit: float = 0.15
    """Solves at prices of memory, and under its limit."""
    hidden: float = 0.3
    """Descents from the best candidates at the prices that timelines give."""
    presets: float = 0.15
    """What each preset leaves, in equal parts, beside a search."""

    until: Deadline = field(default_factory=Deadline, compare=False)
    """From then on, no part of a search begins that has something to answer with."""

    # ---- several axes
    joint_options: int = 8
    """A space whose sites have no more joint options is solved as one problem."""
    gain: float = 1e-6
    """The relative improvement below which a descent, a pool or another plan counts as none."""
    hopeless: float = 1.3
    """A descent that is so many times above what matters when every axis was free once is not gone on with."""
    bound_options: int = 5000
    """A site that expands in more joint options counts as nothing in the lower bound on the step."""
    apart_options: int = 5000
    """Joint options of a space from which on parts of its search are worth a process of their own."""

    # ---- the choice among candidates
    rounds: int = 3
    """Times that timelines give prices, at which descents lead on from the shortest candidate."""
    round_gain: float = 1e-3
    """A round that makes the step shorter by less is the last: within a limit one writes programs for seconds."""
    near_price: float = 1.04
    """Within a limit what a descent ends with is not mixed where it is dearer by so much, at the limit's price of
    memory: of 20 such ends those that led to a shorter step were at 1.033 or below, but for gains of 0.2% and less."""
    near_mixed: float = 1.005
    """The same of its first mixture, as if as much was hidden as in the timeline of the shortest: of 12 such mixtures
    those that led to a shorter step were at 1.003 or below, and Llama-3-8B's, which lead to none, are above 1.007."""
    hidden_within: float = 0.5
    """Of what the cheapest plan's timeline hides, where a memory limit binds: of 0, a half and all, a half was the best
    for Llama-3-8B, Mixtral, BERT and GPT-2 together."""
    rival: float = 1.5
    """A preset is estimated if it is no longer than so many times the shortest, at the prices of its timeline."""
    hidden_worth: float = 0.02
    """Descents lead on where communication has at least this part of a step."""
    unsure: float = 0.05
    """Of a step that a program of few copies predicts: what is written in parts may be shorter by so much in truth."""
    preset_options: int = 20
    """A preset that leaves more options a site, as some do on four axes, is not looked at beside a search: solved as
    one problem, it takes longer than that."""
    limited_preset: float = 0.5
    """Of the work: the search under a limit among what a preset leaves, which few presets come to."""
    own_presets: int = 7
    """Among how many presets the share is divided: one that is registered takes nothing from the others."""

    # ---- the memory limit
    price_first: float = 0.02
    """Of a byte (seconds of the cheapest plan / its bytes), where nothing of the pool keeps the limit."""
    price_rise: float = 25.0
    """From one such price to the next: where the highest comes at once, GPT-2's step on 2 x 2 is 0.5% longer."""
    price_most: float = 1e5
    """The most that is tried: at it, what needs the fewest bytes is the best."""
    limit_rounds: int = 5
    """Times that the options are solved under a limit on the sum of bytes, until the peak keeps that on memory."""
    confirmations: int = 3
    """Answers of which the true peak is looked at, before peaks are no longer estimated."""
    limit_slack: float = 0.001
    """Part of a limit that may be left unused."""
    buckets_in_flight: int = 8
    """A peak that is over the limit by so many buckets will not keep it with smaller ones."""

    # ---- the mesh is chosen too
    mesh_axes: int = 3
    """Axes of two ranks or more that a mesh has at most."""
    meshes: int = 96
    """So many meshes are looked at, those without a wide axis first: more take hours, and are hardly better."""
    mesh_finalists: int = 3
    """Meshes that are searched thoroughly."""
    meshes_work: float = 8.0
    """Searches whose work the first looks at all meshes may take together."""

    # ---- the search that measures
    measured_programs: int = 5
    """That one search measures."""
    doubt: float = 0.25
    """How far a prediction may be above the truth when one program was measured: from program to program, what they
    take over their timelines differs by so much. With n of them, in whose middle the truth is sought, by 1 / sqrt(n)
    of it."""
    worthless: float = 1.1
    """A program is stopped when it is slower by so much than the best could be."""

    def __post_init__(self) -> None:
        total = self.descents + self.limit + self.hidden + self.presets
        assert math.isclose(total, 1.0), total

    @property
    def is_over(self) -> bool:
        """Whether the seconds that a person gave have passed, or the person ended the search."""
        return self.until.is_over

    def share(self, part: float) -> Effort:
        """With a part of the work."""
        return replace(self, work=part * self.work)

    @property
    def hidden_share(self) -> float:
        """Of the work: such a search is one descent."""
        return self.hidden / self.descents / self.rounds

    @property
    def preset_share(self) -> float:
        """Of the work: what a preset leaves is solved as one problem."""
        return self.presets / self.own_presets / self.descents


EFFORT = Effort()


@dataclass(slots=True, kw_only=True)
class Meter(Work):
    """The work of one solve under the thresholds of a search."""

    effort: Effort = EFFORT

    @property
    def limits(self) -> Limits:
        return self.effort


@dataclass(slots=True, kw_only=True)
class Purse:
    """What a part of a search has left of its share."""

    left: float = math.inf
    gone: float = 0.0

    def spend(self, work: float) -> None:
        self.gone += work
        self.left = max(0.0, self.left - work)

    @property
    def spent(self) -> float:
        """The part of the share that is gone, from 0 to 1."""
        return min(1.0, self.gone / (self.gone + self.left)) if self.gone else float(self.is_empty)

    @property
    def is_empty(self) -> bool:
        return self.left <= 0.0
