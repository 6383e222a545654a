"""The simulator: streams, what waits for what, and how those that run at once share what there is."""

from __future__ import annotations

import itertools
import random

import pytest

from autopar.cost.simulator import Task, TaskSpan, fair_rates, scheduled


def flow(stream: str, seconds: float, part: float = 1.0, fixed: float = 0.0, after: tuple[int, ...] = ()) -> Task:
    return Task(stream=stream, after=after, fixed_seconds=fixed, moving_seconds=seconds, uses=(("link", part),))


def times(*tasks: Task) -> list[tuple[float, float]]:
    return [(pytest.approx(s.start_seconds), pytest.approx(s.end_seconds)) for s in scheduled(tasks)]


def test_tasks_of_a_stream_follow_each_other_and_others_run_beside_them() -> None:
    a, b = Task(stream="a", fixed_seconds=2.0), Task(stream="b", fixed_seconds=3.0, after=(0,))
    assert times(a, a, b, a) == [(0, 2), (2, 4), (2, 5), (4, 6)]


def test_a_task_takes_its_fixed_and_moving_seconds_and_at_least_so_many() -> None:
    one = Task(stream="a", fixed_seconds=1.0, moving_seconds=2.0)
    least = Task(stream="b", fixed_seconds=1.0, moving_seconds=2.0, least_seconds=5.0, uses=(("link", 1.0),))
    assert times(one, least) == [(0, 3), (0, 5)]


def test_two_that_fill_a_link_have_half_of_it_each_while_both_move() -> None:
    """The second begins to move after 1 s of launching; from 1 to 5 both have half; then it is alone."""
    assert times(flow("a", 3.0), flow("b", 3.0, fixed=1.0)) == [(0, 5), (0, 6)]


def test_who_uses_little_is_left_with_more_of_its_rate() -> None:
    """0.2 and 1 of a link: rates go up together in what is used most, the first in a link of its own."""
    rates = fair_rates({0: {"x": 0.2, "y": 1.0}, 1: {"x": 1.0}})
    assert rates == pytest.approx({0: 1 / 1.2, 1: 1 / 1.2})
    assert fair_rates({0: {"x": 0.2}, 1: {"x": 1.0}}) == pytest.approx({0: 1.0, 1: 0.8})
    assert fair_rates({0: {"x": 0.5}, 1: {"x": 0.5}, 2: {"y": 1.0}}) == {0: 1.0, 1: 1.0, 2: 1.0}
    assert fair_rates({0: {"x": 1.0}, 1: {"x": 1.0}, 2: {"x": 0.1}}) == pytest.approx({0: 0.45, 1: 0.45, 2: 1.0})


@pytest.mark.parametrize("seed", range(20))
def test_no_more_is_used_than_there_is_and_nothing_stands_idle(seed: int) -> None:
    """Between any two moments of a start or an end, by what each has done at its end: of each link at most all; the
    last ends no later than if all ran in turn, and no sooner than what its stream or a link needs."""
    rng = random.Random(seed)
    tasks = []
    for i in range(12):
        uses = {link: rng.choice((0.3, 0.7, 1.0)) for link in rng.sample("xyz", rng.randint(1, 3))}
        after = tuple(rng.sample(range(i), min(i, rng.randint(0, 2))))
        tasks.append(
            Task(stream=rng.choice("abcd"), after=after, moving_seconds=rng.uniform(0.5, 2.0), uses=tuple(uses.items()))
        )
    spans = scheduled(tasks)
    end = max(span.end_seconds for span in spans)
    assert end <= sum(task.seconds for task in tasks) + 1e-9
    for link in "xyz":
        assert sum(task.seconds * dict(task.uses).get(link, 0.0) for task in tasks) <= end + 1e-9
    for task, span in zip(tasks, spans, strict=True):
        assert span.seconds >= task.seconds - 1e-9
        assert all(spans[b].end_seconds <= span.start_seconds for b in task.after)
    for stream in "abcd":
        own = [span for task, span in zip(tasks, spans, strict=True) if task.stream == stream]
        assert all(a.end_seconds <= b.start_seconds for a, b in itertools.pairwise(own))


def test_an_order_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"task 0 on stream 'a' comes after \[0\]: name earlier tasks"):
        scheduled([Task(stream="a", after=(0,))])
    with pytest.raises(ValueError, match=r"task 0 on stream 'a' uses .* parts above 0 and at most 1"):
        scheduled([flow("a", 1.0, part=1.5)])
    assert scheduled([]) == [] and scheduled([Task(stream="a")]) == [TaskSpan(0.0, 0.0)]
