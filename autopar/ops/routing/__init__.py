"""Rows of experts, in the order of tokens.

Implementations of experts sort the rows by expert, multiply them group by group and sort them back, or look
up a copy of the weights for every row. Sorted rows have no place of their own that a rank could hold: where
a row stands depends on all the others. But the operators in between treat every row alike, so that the
order does not matter to them: here the sort is taken out of the graph, and the products become
`expert_mm`, which is told the expert of every row. Rows then split as the tokens do.

Each use of sorted values is proved to be of that kind, by the op's rule or by a pattern of `USES`. A sort with
any other use stays as it is, and so does a lookup.
"""

from autopar.ir.graph import JointGraph

from .dispatch import Dispatch
from .lookups import with_products_by_expert, with_weighted_sums
from .rewrite import RuleOf
from .unsort import without_sorts


def in_token_order(graph: JointGraph, rule_of: RuleOf) -> JointGraph:
    """The graph with sorts of rows by expert, and lookups of weights by expert, replaced by `expert_mm`, with
    a mark wherever rows may set out for their experts, or come back, and with the sums of a token's rows as one
    operator each, which partial sums of rows may go through."""
    if not graph.nodes:  # a model that gives back what it is given
        return graph
    in_order = without_sorts(with_products_by_expert(graph), rule_of)
    return with_weighted_sums(Dispatch(in_order, rule_of).run())
