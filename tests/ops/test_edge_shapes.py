"""Shapes at the edge: operators along a dim of a scalar, which PyTorch takes for a vector of one element there, and
those of tensors without elements."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.testing import check

ALONG = """
unfold(0, 1, 1)|unfold(-1, 1, 1)|index_select(0, first)|gather(0, zero)|index_add(0, zero, s)|index_fill(0, zero, 2.0)
index_copy(0, zero, s * 2)|index_reduce(0, zero, s * 2, "mean")|scatter(0, zero, s * 2)|scatter_add(0, zero, s)
scatter_reduce(0, zero, s, "sum")|take(first)|put(first, s.view(1) * 2)|as_strided((1,), (1,))|repeat(3)|expand(2, 3)
cumsum(0)|cumprod(-1)|logcumsumexp(0)|cummax(0)[0]|cummin(-1)[0]|softmax(0)|log_softmax(-1)|logsumexp(0)|sum(0)|mean(-1)
prod(0)|nansum(0)|amax(0)|norm(dim=0)|median(0)[0]|kthvalue(1, 0)[0]|mode(0)[0]|sort(0)[0]|topk(1, 0)[0]|max(0)[0]
argmax(0)|argsort(0)|count_nonzero(0)|quantile(0.5, 0)|roll(1)|flip([])|transpose(0, -1)|movedim(0, 0)|permute(())
unsqueeze(-1)|squeeze(0)|squeeze(-1)|flatten()|[None]|[...]|[True]
"""


EMPTY = ["h[:0]", "h[:, :0]", "h.view(6, 2, 3)[:, :0]"]

OF_EMPTY = [
    "s.repeat(*([3] * s.dim()))", "cat([s, s])", "cat([s, s], -1)", "cat([s, h.flatten()[:0], s])", "s.split(1)[-1]",
    "s.chunk(2, -1)[0]", "s.cumsum(-1)", "s.transpose(0, -1)", "s @ s.mT", "s.unfold(-1, 0, 1)", "s.sum(0)",
    "s.prod(-1)", "F.dropout(s)", "F.group_norm(s.reshape(0, 4, 3, 2), 2)",
]  # fmt: skip


class Along(nn.Module):
    """An expression of `s`, which is another of `h`: what a linear layer makes of 6 rows, (6, 6)."""

    def __init__(self, expression: str, source: str = "h.sum()") -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.expression, self.source = expression, source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        s = eval(self.source, {"h": h})
        names = {"s": s, "h": h, "F": F, "cat": torch.cat, "zero": torch.tensor(0), "first": torch.tensor([0])}
        return h.tanh().mean() * (1 + h[0, 0] + eval(self.expression, names).sum())


@pytest.mark.parametrize(
    "expression", [f"s{'' if e[0] == '[' else '.'}{e}" for e in ALONG.strip().replace("\n", "|").split("|")]
)
def test_along_a_dim_that_a_scalar_does_not_have(expression):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    found = check(Along(expression).double(), {"a": 2}, (x,), plans=2, steps=2)
    assert found.equal, str(found)


@pytest.mark.parametrize("source", EMPTY)
@pytest.mark.parametrize("expression", OF_EMPTY)
def test_of_no_elements(expression, source):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    found = check(Along(expression, source).double(), {"a": 2}, (x,), plans=2, steps=2)
    assert found.equal, str(found)
