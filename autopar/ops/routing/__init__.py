"""Rows of experts, in the order of tokens.

Implementations of experts sort the rows by expert, multiply them group by group and sort them back, or look
up a copy of the weights for every row. Sorted rows have no place of their own that a rank could hold: where
a row stands depends on all the others. But the operators in between treat every row alike, so that the
order does not matter to them: this pass removes the sort from the graph, and turns the products into
`expert_mm`, which reads the expert of every row. Rows then split as the tokens do.

The op's rule or a pattern of `USES` proves each use of sorted values to be of that kind. A sort with any other use
stays as it is, and so does a lookup.
"""

from autopar.ir.graph import JointGraph

from .dispatch import Dispatch
from .lookups import with_products_by_expert, with_weighted_sums
from .rewrite import RuleOf
from .unsort import without_sorts


def in_token_order(graph: JointGraph, rule_of: RuleOf) -> JointGraph:
    """The graph with `expert_mm` in place of sorts of rows and lookups of weights by expert. Marks show where rows may
    set out for their experts, or come back. Each sum of a token's rows is one operator, linear in the rows."""
    if not graph.nodes:  # a model that returns its inputs
        return graph
    in_order = without_sorts(with_products_by_expert(graph), rule_of)
    return with_weighted_sums(Dispatch(in_order, rule_of).run())
