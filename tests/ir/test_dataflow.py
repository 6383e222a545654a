"""What depends on what in a list of nodes of ten lines."""

from __future__ import annotations

from autopar.ir.dataflow import derived, ending, leading, reached, reads_some, viewed
from autopar.ir.text import parsed_graph

GRAPH = parsed_graph(
    """
    x = input args.0: float32[4, 4]
    w = parameter w: float32[4, 4]

    forward
    one = aten.ones.default((4, 4))
    used = aten.neg.default(w)
    wide = aten.add.Tensor(used, one)
    y = aten.mm.default(x, used)
    flat = aten.reshape.default(y, (16,))
    back = aten.reshape.default(flat, (2, 8))
    z = aten.exp.default(back)

    backward

    output output = z
    """
)
NODES = GRAPH.nodes


def names(positions: set[int]) -> list[str]:
    return [NODES[position].name for position in sorted(positions)]


def test_what_depends_on_any_of_some_values() -> None:
    assert reached(NODES, ["w"]) == {"w", "used", "wide", "y", "flat", "back", "z"}
    assert reached(NODES, ["x"], lambda node: node.op != "aten.exp.default") == {"x", "y", "flat", "back"}


def test_what_is_made_of_some_values_alone() -> None:
    assert derived(NODES, ["w"]) == {"w", "one", "used", "wide"}
    assert derived(NODES, ["w"], reads_some) == {"w", "used"}


def test_what_values_come_from() -> None:
    assert names(leading(NODES, ["flat"])) == ["used", "y", "flat"]
    assert names(leading(NODES, ["flat"], lambda node: node.name != "y")) == ["flat"]
    assert names(leading(NODES, ["flat"], made={"flat": 4, "y": 3})) == ["y", "flat"]


def test_what_leads_to_results_alone() -> None:
    assert [node.name for node in ending(NODES, lambda node: True, {"z"})] == ["y", "flat", "back", "z"]
    assert [node.name for node in ending(NODES, lambda node: True, {"z", "wide"})] == [node.name for node in NODES]
    assert not ending(NODES, lambda node: node.name != "z", {"z"})


def test_what_a_value_is_a_view_of() -> None:
    root, views = viewed(GRAPH, "back")
    assert (root, [view.name for view in views]) == ("y", ["back", "flat"])
    assert viewed(GRAPH, "z") == ("z", [])
