"""Operators along a dim of a tensor that has none: PyTorch takes a scalar for a vector of one element there."""

import pytest
import torch
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


class Along(nn.Module):
    def __init__(self, expression: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.expression = expression

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        s = h.sum()
        names = {"s": s, "zero": torch.tensor(0), "first": torch.tensor([0])}
        return h.tanh().mean() * (s + eval(self.expression, names).sum())


@pytest.mark.parametrize(
    "expression", [f"s{'' if e[0] == '[' else '.'}{e}" for e in ALONG.strip().replace("\n", "|").split("|")]
)
def test_along_a_dim_that_a_scalar_does_not_have(expression):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    found = check(Along(expression).double(), {"a": 2}, (x,), plans=2, steps=2)
    assert found.equal, str(found)
