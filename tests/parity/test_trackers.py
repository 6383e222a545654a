"""Silent wrong results that public trackers tell of, each as a small model that shows it, and equal here.

Frameworks whose users write the collectives themselves lose parity in few ways: a mean of means, a reduction that one
rank does alone, a gradient that nobody adds up, a number that each rank adds once, numbers drawn per rank. Each class
has a model here, on meshes and plans in which the value in question is split. `mistake` is what the step would give if
it were made: it must differ, or the model would show nothing. A collection for composed parallelisms is
github.com/NVIDIA/Megatron-LM/issues/7452. (Clipping by a global norm, accumulation and values made shard by shard need
ranks: `test_parity.py`, `test_runtime.py`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.testing import EagerTrial

Tensor = torch.Tensor
MESH = {"dp": 2, "tp": 2}
BATCH, LENGTH, WIDTH, VOCABULARY = 4, 4, 8, 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its inputs, and the loss that the mistake would make."""

    model: nn.Module
    args: tuple[Tensor, ...]
    mistake: Callable[[nn.Module, tuple[Tensor, ...]], Tensor] | None = None
    steps: int = 1


class Loss(nn.Module):
    """A small language model with a loss of its outputs and labels."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.loss = loss

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids))).flatten(0, 1)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.logits(ids), labels.flatten())


def ids(vocabulary: int = VOCABULARY, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(vocabulary, (2, batch, LENGTH), generator=generator)
    return drawn[0], drawn[1]


def features(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(2))


def halves(model: Loss, args: tuple[Tensor, ...]) -> Tensor:
    """The mean of what each half of the batch makes."""
    return torch.stack([model(*(a[part] for a in args)) for part in (slice(0, 2), slice(2, 4))]).mean()


def ragged() -> Case:
    """github.com/pytorch/torchtitan/pull/2206: ranks with few valid tokens weigh as much as those with many."""
    tokens, labels = ids()
    labels[0, 1:], labels[1] = -100, -100
    return Case(model=Loss(F.cross_entropy), args=(tokens, labels), mistake=halves)


def a_rank_without_tokens() -> Case:
    """A mean over no tokens is not a number, though other ranks have some."""
    tokens, labels = ids()
    labels[:2] = -100
    return Case(model=Loss(F.cross_entropy), args=(tokens, labels), mistake=halves)


def class_weights() -> Case:
    """A weighted mean is divided by the weights of all tokens."""
    weight = torch.linspace(0.1, 3, VOCABULARY, dtype=torch.float64)
    return Case(model=Loss(lambda x, y: F.cross_entropy(x, y, weight)), args=ids(), mistake=halves)


def label_smoothing() -> Case:
    """github.com/NVIDIA/Megatron-LM/issues/737: each rank smooths over its part of the vocabulary."""

    def mistake(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(model, Loss)
        log = model.logits(args[0]).log_softmax(-1)
        return 0.8 * F.nll_loss(log, args[1].flatten()) - 0.2 * log[:, : VOCABULARY // 2].mean(-1).mean()

    return Case(model=Loss(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2)), args=ids(), mistake=mistake)


def doubled_vocabulary() -> Case:
    """github.com/NVIDIA/Megatron-LM/issues/7452: logits that are gathered are summed over ranks once more."""

    def mistake(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        return model(*args) + math.log(2)

    return Case(
        model=Loss(lambda x, y: (x.logsumexp(-1) - x.gather(1, y[:, None])[:, 0]).mean()), args=ids(), mistake=mistake
    )


def padded_vocabulary() -> Case:
    """A vocabulary of 13 on ranks: the padding takes part in no softmax, and a batch of 5 in no mean."""

    def mistake(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(model, Loss)
        return F.cross_entropy(F.pad(model.logits(args[0]), (0, 1)), args[1].flatten())

    return Case(model=Loss(F.cross_entropy, 13), args=ids(13, 5), mistake=mistake)


def squared_logits() -> Case:
    """The z-loss: the square of a logarithm of a sum over the whole vocabulary."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + 0.1 * logits.logsumexp(-1).pow(2).mean()

    return Case(model=Loss(loss), args=ids())


class Tied(nn.Module):
    """An embedding that is the head too has the sum of two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(self.embedding(tokens)).tanh()).flatten(0, 1), labels.flatten())


class Attention(nn.Module):
    """With rotary positions, queries and keys normed by head or across heads, few key heads, and a learned sink."""

    def __init__(
        self, *, heads: int = 4, key_heads: int = 4, norm: str = "", sink: bool = False, packed: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.key_heads, self.norm, self.packed = heads, key_heads, norm, packed
        self.size = size = 2 * (WIDTH // heads)
        self.query, self.out = nn.Linear(WIDTH, heads * size), nn.Linear(heads * size, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, key_heads * size), nn.Linear(WIDTH, key_heads * size)
        whole = norm == "across"
        self.query_norm = nn.RMSNorm(heads * size if whole else size)
        self.key_norm = nn.RMSNorm(key_heads * size if whole else size)
        self.sink = nn.Parameter(torch.randn(heads)) if sink else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.norm == "across":
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in (q, k, v))
        if self.norm == "head":
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = self.rotated(q), self.rotated(k)
        k, v = (t.repeat_interleave(self.heads // self.key_heads, 1) for t in (k, v))
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        if self.packed:  # two documents
            document = torch.arange(length) >= length // 2 - 1
            allowed = allowed & (document[:, None] == document[None])
        scores = (q @ k.mT / math.sqrt(self.size)).masked_fill(~allowed, -math.inf)
        if self.sink is not None:
            sink = self.sink[:, None, None].expand(x.shape[0], -1, length, 1)
            weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)).pow(2).mean()

    def rotated(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10 ** torch.arange(half, dtype=x.dtype)
        one, other = x[..., :half], x[..., half:]
        return torch.cat([one * angle.cos() - other * angle.sin(), other * angle.cos() + one * angle.sin()], -1)


def restarted_positions(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    """Each half of the sequence by itself, from position 0."""
    return torch.stack([model(part) for part in args[0].chunk(2, 1)]).mean()


class Block(nn.Module):
    """Norms beside a layer that is cut by column and then by row, and its bias."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.outer(self.down(self.inner(self.up(self.first(x)).relu())))).sin().mean()


def twice_the_bias(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    assert isinstance(model, Block)
    with torch.no_grad():
        model.down.bias.mul_(2)
        made: Tensor = model(*args)
        model.down.bias.div_(2)
    return made


class Experts(nn.Module):
    """A router with a loss that balances experts: a product of two means over all tokens, without padding."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.router, self.padded = nn.Linear(WIDTH, 4, bias=False), padded
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chance = self.router(x).softmax(-1)
        value, chosen = chance.topk(2, -1)
        taken = F.one_hot(chosen, 4).to(x.dtype).sum(-2)
        made = torch.einsum("bse,bsi,eij->bsj", taken * chance / value.sum(-1, keepdim=True), x, self.experts)
        kept = torch.ones(x.shape[:2], dtype=x.dtype)
        if self.padded:
            kept[0, 1:] = 0
        kept = kept[..., None] / kept.sum()
        balance = 4 * ((taken * kept).sum((0, 1)) * (chance * kept).sum((0, 1))).sum()
        return made.pow(2).mean() + 0.1 * balance


class Several(nn.Module):
    """Heads that predict the next tokens, each divided by the number of its own valid labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(3))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h, losses = self.embedding(tokens), []
        for ahead, head in enumerate(self.heads):
            shifted = F.pad(labels[:, ahead:], (0, ahead), value=-100)
            losses.append(F.cross_entropy(head(h).flatten(0, 1), shifted.flatten()))
        return losses[0] + 0.3 * torch.stack(losses[1:]).mean()


class Contrast(nn.Module):
    """Pairs against all others of the global batch, not of a rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 6)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.normalize(self.left(x[:, 0]), dim=-1), F.normalize(self.right(x[:, 1]), dim=-1)
        logits = self.scale.exp() * one @ other.T
        target = torch.arange(x.shape[0])
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


class Statistics(nn.Module):
    """BatchNorm over the batch of all ranks, with what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x).flatten(0, 1)).relu().pow(2).mean()


class LastToken(nn.Module):
    """A head on the last token that is no padding, wherever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        last = (labels != 0).long().cumsum(1).argmax(1)
        h = self.embedding(tokens)
        picked = h[torch.arange(h.shape[0]), last]
        return F.cross_entropy(self.head(picked), labels[:, 0] % 3)


class Distilled(nn.Module):
    """A divergence that is divided by the batch, of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        log, target = self.student(x).log_softmax(-1), self.teacher(x).log_softmax(-1)
        return F.kl_div(log, target, reduction="batchmean", log_target=True)


def halves_of_x(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([model(part) for part in args[0].chunk(2)]).mean()


def of_x(model: nn.Module, mistake: Callable[..., Tensor] | None = None, steps: int = 1) -> Case:
    return Case(model=model, args=(features(),), mistake=mistake, steps=steps)


CASES: dict[str, Callable[[], Case]] = {
    "loss over ragged token counts": ragged,
    "a rank without a valid token": a_rank_without_tokens,
    "weights of classes": class_weights,
    "label smoothing over a split vocabulary": label_smoothing,
    "a vocabulary that is summed twice": doubled_vocabulary,
    "a vocabulary and a batch that do not divide": padded_vocabulary,
    "squares of logsumexp": squared_logits,
    "a tied embedding": lambda: Case(model=Tied(), args=ids()),
    # github.com/NVIDIA/Megatron-LM/pull/3943: token counts of several heads
    "several heads with counts of their own": lambda: Case(model=Several(), args=ids(), mistake=None),
    # github.com/NVIDIA/Megatron-LM/issues/1446: gradients of norms that see a part of the sequence each
    "norms beside a split layer": lambda: of_x(Block()),
    # github.com/huggingface/text-generation-inference/issues/1036
    "a bias that every rank adds": lambda: of_x(Block(), twice_the_bias),
    # github.com/tenstorrent/tt-metal/issues/55947: masks by rank instead of by place
    "dropout of split and of whole values": lambda: of_x(Block(0.4), steps=2),
    # github.com/NVIDIA-NeMo/RL/issues/3716: a norm that all heads share, whose heads are on several ranks
    "queries normed by head": lambda: of_x(Attention(norm="head")),
    # github.com/EleutherAI/gpt-neox/pull/1424: a norm across heads is not one of a rank's heads
    "queries normed across heads": lambda: of_x(Attention(norm="across")),
    "fewer key heads than ranks": lambda: of_x(Attention(key_heads=1)),
    # a comment to github.com/NVIDIA/Megatron-LM/issues/7452 names sinks
    "a learned sink a head": lambda: of_x(Attention(sink=True)),
    "positions of a split sequence": lambda: of_x(Attention(), restarted_positions),
    "two documents in a sequence": lambda: of_x(Attention(packed=True)),
    # github.com/NVIDIA/Megatron-LM/pull/5047
    "a balance of experts over all tokens": lambda: of_x(Experts(False), halves_of_x),
    "a balance of experts without padding": lambda: of_x(Experts(True)),
    # the loss of a rank's own pairs
    "contrasts over the global batch": lambda: of_x(Contrast(), halves_of_x),
    "statistics of the global batch": lambda: of_x(Statistics(), halves_of_x, steps=2),
    "the last token that is no padding": lambda: Case(model=LastToken(), args=ids()),
    "a divergence divided by the batch": lambda: of_x(Distilled()),
}


def made(name: str) -> Case:
    torch.manual_seed(0)
    case = CASES[name]()
    with torch.no_grad():
        for parameter in case.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return case


@pytest.mark.parametrize("name", CASES)
def test_what_goes_wrong_elsewhere_is_equal_here(name: str) -> None:
    case = made(name)
    trial = EagerTrial(case.model, case.args, steps=case.steps)
    rows = [trial.of_solver(MESH, "dp")]
    rows += [trial.of_random(MESH, seed, lower=False) for seed in range(2)]
    rows += [trial.of_random({"tp": 4}, seed, lower=False) for seed in range(2)]
    try:
        rows.append(trial.of_solver(MESH, "megatron_sp"))
    except ValueError as error:
        assert "megatron_sp" in str(error), "a preset that does not fit says so by its name"
    assert all(row.equal for row in rows), [row for row in rows if not row.equal]


@pytest.mark.parametrize("name", [name for name, make in CASES.items() if make().mistake is not None])
def test_the_model_would_show_the_mistake(name: str) -> None:
    case = made(name)
    model = case.model.double()
    args = tuple(a.double() if a.is_floating_point() else a for a in case.args)
    assert case.mistake is not None
    right, wrong = model(*args), case.mistake(model, args)
    assert not (right - wrong).abs() <= 1e-6


def test_an_evaluation_is_a_mean_over_tokens_and_not_over_ranks() -> None:
    case = made("loss over ragged token counts")
    case.model.eval()
    with torch.no_grad():
        trial = EagerTrial(case.model, case.args)
        assert trial.of_solver(MESH, "dp").equal and trial.of_random(MESH, 1).equal
