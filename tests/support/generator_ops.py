"""The operators of generated programs: where a program begins and ends, expressions, and modules.

Operators on floats do nothing at which a rounding decides. What fails for a shape is left out when a program is built.
"""

# A line of a program is a line here, however many ways to write it stand in it.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

from generator_kinds import FUNCTIONS, Table

START, END, OPERATORS = Table(), Table(), Table()
"""Kinds that begin a program (each makes `{y}` of inputs), that end it (each returns), and those between that are
operators alone."""

# ---------------------------------------------------------------------------------------------- how a program begins

ROWS, WIDTHS = "8|6|4|5|7|3|2|1", "4|6|8|3|5|7|12|2"

START("rows", 6, f"""
--batch
x = torch.randn({{{ROWS}}}, {{{WIDTHS}}}, dtype=torch.float64, generator=g)
--init
self.first = nn.Linear({{x.w}}, {{{WIDTHS}}})
--forward
{{y}} = self.first(x)
""")

START("sequence", 5, f"""
--batch
x = torch.randn({{{ROWS}}}, {{{ROWS}}}, {{{WIDTHS}}}, dtype=torch.float64, generator=g)
--init
self.first = nn.Linear({{x.w}}, {{{WIDTHS}}})
--forward
{{y}} = self.first(x)
""")

START("image", 2, """
--batch
x = torch.randn({1|2|4|5}, {3|4|6}, {4|5|6}, {4|6}, dtype=torch.float64, generator=g)
--init
self.first = nn.Conv2d({x.c}, {4|6}, 3, padding=1)
--forward
{y} = self.first(x).movedim(1, -1)
""")

START("input with gradient", 1, f"""
--batch
x = torch.randn({{{ROWS}}}, {{{WIDTHS}}}, dtype=torch.float64, generator=g).requires_grad_()
--init
self.first = nn.Linear({{x.w}}, {{x.w}})
--forward
{{y}} = self.first(x) + x.sin()
""")

TOKENS = f"""
--batch
x = torch.randint(0, 10, ({{{ROWS}}}, {{{ROWS}}}), generator=g)
--init
self.first = nn.Embedding(10, {{w:={WIDTHS}}}%s)
"""

START(
    "tokens", 4,
    *(TOKENS % arguments + more for arguments, more in (
        ("", "--forward\n{y} = self.first(x)"),
        (", padding_idx=3", "--forward\n{y} = self.first(x)"),
        (", sparse=True", "--forward\n{y} = self.first(x)"),
        (", max_norm=1.0", "--forward\n{y} = self.first(x)"),
        ("", "self.positions = nn.Embedding(12, {w})\n--forward\n"
             "{y} = self.first(x) + self.positions(torch.arange(x.shape[1]) + 2)"),
        ("", "--forward\n{y} = self.first(x) * self.first((x * 3 + 1) % 10)"),
        ("", "self.bag = nn.EmbeddingBag(10, {w}, mode='{mean|sum|max}')\n--forward\n"
             "{y} = self.first(x) + self.bag(x)[:, None]"),
        ("", "--forward\n{y} = F.one_hot(x, 10).to(torch.float64) @ self.first.weight"),
        ("", "--forward\n{y} = self.first(x) + self.first(F.pad(x[:, :-1], (1, 0), value=1))"),
        ("", "--forward\n{y} = self.first(x).masked_fill((x == 2)[..., None], 0.5)"),
        ("", "self.head = nn.Linear({w}, 10, bias=False)\nself.head.weight = self.first.weight\n--forward\n"
             "{y} = self.head(self.first(x).tanh())"),
    )),
)

# ------------------------------------------------------------------------------------------------ how a program ends

END("square", 5, "return {x}.square().mean()", "return ({x} * {x}.detach().cos()).mean()",
    "return F.mse_loss({x}, {x}.detach().cos())", "return {x}.tanh().sum() / 10")

END("penalty", 1, "return {x}.sin().mean() + 0.01 * sum(p.pow(2).sum() for p in self.parameters())")

END("classes", 2, """
--init
self.last = nn.Linear({w}, 5)
--forward
labels = torch.arange({x}[..., 0].numel()) % 5
labels[::3] = -100
return F.cross_entropy(self.last({x}).flatten(0, -2), labels, label_smoothing={0.0|0.1})
""", """
--batch
labels = torch.randint(0, {w}, {s}[:-1], generator=g)
--forward
return F.{cross_entropy({x}.flatten(0, -2), labels.flatten())|nll_loss({x}.flatten(0, -2).log_softmax(-1), labels.flatten())}
""")

END("a loss of torch's", 2,
    "return F.smooth_l1_loss({x}, {x}.detach().roll(1, 0))", "return F.binary_cross_entropy_with_logits({x}, {x}.detach().sigmoid())",
    "return F.kl_div({x}.log_softmax(-1), {x}.detach().softmax(-1).roll(1, 0), reduction='batchmean')",
    "return F.cosine_embedding_loss({x}.flatten(1), {x}.flatten(1).roll(1, 0).detach(), torch.ones({r}))",
    "return F.huber_loss({x}, torch.zeros_like({x}), delta=0.3)", "return -F.cosine_similarity({x}, {x}.detach().cos(), dim=-1).mean()",
    "return F.gaussian_nll_loss({x}, torch.zeros_like({x}), {x}.exp())", "return F.soft_margin_loss({x}, torch.ones_like({x}))",
    "return F.triplet_margin_loss({x}.flatten(1), {x}.flatten(1).roll(1, 0), {x}.flatten(1).flip(0))",
    "return torch.distributions.kl_divergence(torch.distributions.Normal({x}, 1.0), torch.distributions.Normal(0.0, 1.0)).mean()",
    "return -torch.distributions.Categorical(logits={x}).entropy().mean()")

END("loss_fn", 1, """
--top
def loss_fn(output):
    return F.mse_loss(output, output.detach().cos())
--forward
return {x}
""")

END("field", 1, """
--top
class Output:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits

torch.utils._pytree.register_pytree_node(
    Output, lambda o: ([o.loss, o.logits], None), lambda leaves, _: Output(*leaves)
)
--forward
return Output({x}.tanh().sum() / 10, {x})
""", """
--top
@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
--forward
return Output(loss={x}.tanh().sum() / 10, logits={x})
""")

OF_OUTPUT = """
--top
def loss_of(output):
    return {how}
--forward
return {what}
"""

END("structure", 1, *(OF_OUTPUT.replace("{how}", how).replace("{what}", what) for how, what in (
    ("output.square().mean()", "{x}"),
    ("output[0].square().mean() + output[1].sin().mean()", "{x}, {x}.mean(0)"),
    ("output['made'].square().mean()", "{'made': {x}, 'size': {x}.shape[0]}"),
)))

# ------------------------------------------------------------------------------------------------------- expressions


def expressions(name: str, weight: float, *texts: str, **options: Any) -> None:
    OPERATORS(name, weight, *("{y} = " + text for text in texts), **options)


expressions("pointwise", 6, *FUNCTIONS)

expressions(
    "more pointwise", 4,
    "torch.where({x} > 0.1, {x}, 0.3 * {x} - 0.01)",
    "{x}.abs().add(1).log() * {x}.sign()",
    "torch.maximum({x}, {x}.roll(1, 0) + 0.1)",
    "torch.addcmul({x}, {x}, {x}.roll(1, -1), value=0.5)",
    "torch.lerp({x}, {x}.flip(-1), 0.3)",
    "{x}.clamp(-0.7, 0.9) + F.leaky_relu({x})",
    "torch.logaddexp({x}, torch.zeros_like({x})) / (1 + {x} * {x})",
    "F.glu(torch.cat([{x}, {x}.cos()], -1), -1)",
)

expressions(
    "sum with an earlier value", 5,
    "{x} + {z}", "{x} * {z}.tanh()", "torch.where({z} > 0, {x}, {z})", "torch.stack([{x}, {z}]).mean(0)",
)

expressions(
    "views", 5,
    "{x}.transpose(0, 1)",
    "{x}.flatten(0, 1).flip(0).unflatten(0, {x}.shape[:2])",
    "{x}.movedim(0, -1).reshape({x}.shape)",
    "{x}.transpose(1, -1).transpose(1, -1)[:, :]",
    "{x}.unsqueeze(1).expand(-1, 3, *{x}.shape[1:]).sum(1)",
    "{x}.reshape(-1).view({x}.shape)",
    "{x}.mT.contiguous().mT",
    "{x}[:, None].squeeze(1).permute(*reversed(range({x}.dim()))).permute(*reversed(range({x}.dim())))",
)

expressions(
    "pieces", 5,
    "torch.cat({x}.split([1, {w} - 1], -1)[::-1], -1)",
    "torch.stack({x}.unbind(1)[::-1], 1)",
    "torch.cat([{x}[:, 1:], {x}[:, :1].sin()], 1)",
    "torch.cat([{x}, {x}[..., :1]], -1)",
    "torch.stack([{x}, {x}.cos()], 1).flatten(0, 1)",
    "F.pad({x}[..., 1:], (0, 1), value=0.5)",
    "{x}[:, ::2].repeat_interleave(2, 1)[:, : {x}.shape[1]]",
    "{x}.tile(1, 2, *([1] * ({x}.dim() - 2)))",
    "{x}[{x}.shape[0] // 2 :]",
    "torch.cat({x}.chunk(2, {dim})[::-1], {dim})",
    "torch.cat([{x}, {z}], {dim})",
)

expressions(
    "reductions", 5,
    "{x} - {x}.mean(0, keepdim=True)",
    "{x} / (1 + {x}.norm(dim=-1, keepdim=True))",
    "{x} - {x}.logsumexp(1, keepdim=True)",
    "{x} * {x}.amax(-1, keepdim=True)",
    "({x} - {x}.mean()) / ({x}.var() + 1).sqrt()",
    "{x} + {x}.sum((0, -1), keepdim=True).tanh()",
    "{x}.mean(1, keepdim=True) + {x}.std(0, unbiased=False, keepdim=True) * 0.1",
    "{x} * torch.prod({x}.sigmoid() + 0.5, 1, keepdim=True)",
)

expressions(
    "along a dim", 5,
    "{x}.softmax({dim}) * {x}",
    "{x}.log_softmax({dim})",
    "{x}.cumsum({dim}).tanh()",
    "{x}.sort({dim}).values",
    "{x}.index_select({dim}, (torch.arange({x}.shape[{dim}]) * 2 + 1) % {x}.shape[{dim}])",
    "{x}.gather({dim}, {x}.detach().argsort({dim}))",
    "{x} * torch.zeros_like({x}).scatter({dim}, {x}.detach().argmax({dim}, keepdim=True), 1.0) + {x}",
    "{x}.roll(1, {dim}) - {x}",
    "{x}.flip({dim}) + {x}",
)

expressions(
    "complex", 1,
    "torch.fft.irfft(torch.fft.rfft({x}) * torch.exp(1j * torch.arange({w} // 2 + 1)), n={w})",
    "torch.fft.fft({x}, dim=0).abs() * 0.3",
    "torch.polar({x}.abs() + 0.5, {x}).real",
)

expressions(
    "linear algebra", 2,
    "{x} @ torch.linalg.inv(torch.eye({w}, dtype={x}.dtype) * 3 + 0.1 * {x}.mT @ {x})",
    "{x} + torch.linalg.slogdet(torch.eye({w}, dtype={x}.dtype) * 3 + 0.1 * {x}.mT @ {x}).logabsdet.sum() * 0.1",
    "torch.linalg.solve(torch.eye({w}, dtype={x}.dtype) * 3 + 0.1 * {x}.mT @ {x}, {x}.mT).mT",
    "{x} + torch.linalg.cholesky(torch.eye({w}, dtype={x}.dtype) * 3 + 0.1 * {x}.mT @ {x}).sum() * 0.1",
    "{x} + torch.linalg.{norm|matrix_norm|vector_norm}({x})",
    "{x} @ torch.linalg.matrix_exp(0.1 * {x}.mT @ {x})",
)

expressions(
    "picks", 3,
    "{x}.topk({1|2}, {dim}).values.mean({dim}, keepdim=True) + {x}",
    "{x} * ({x} >= {x}.topk(2, -1).values[..., -1:])",
    "{x} + {x}.{median|max|min}({dim}, keepdim=True).values",
    "{x} + {x}.kthvalue(1, {dim}, keepdim=True).values",
    "torch.zeros_like({x}).scatter_reduce({dim}, {x}.detach().argsort({dim}), {x}, '{sum|mean|amax}') + {x}",
    "{x} + torch.take_along_dim({x}, {x}.detach().argmin({dim}, keepdim=True), {dim})",
    "torch.where({x} > {x}.mean(), {x}, {z}.sin())",
)

expressions(
    "constants", 3,
    "{x} * torch.tensor([0.5, 2.0] if self.training else [3.0, 4.0], dtype={x}.dtype).prod()",
    "{x} + torch.arange({w}, dtype={x}.dtype) / {w}", "{x} * torch.linspace(0, 1, {w}, dtype={x}.dtype).tolist()[-1]",
    "{x} + torch.from_numpy(np.ones({w}))", 
    "{x} @ torch.eye({w}, dtype={x}.dtype).{triu()|flip(0)|roll(1, 0)}", "{x} * float(torch.ones(3).sum())",
    "{x}.masked_fill(torch.arange({w}) % 3 == 0, 0.3)",
)

expressions(
    "quantisation", 1,
    "torch.fake_quantize_per_tensor_affine({x}.float(), 0.1, 0, -8, 7).to({x}.dtype) + {x}",
    "torch.fake_quantize_per_channel_affine({x}.float(), torch.full(({w},), 0.1), torch.zeros({w}, dtype=torch.int32), "
    "-1 % {x}.dim(), -8, 7).to({x}.dtype) + {x}",
    "({x} * 10).round().detach() / 10 + {x} - {x}.detach()",
)

# ----------------------------------------------------------------------------------------------------------- modules


def modules(
    name: str, weight: float, *texts: str, top: str = "", before: str = "{x}", after: str = "", **options: Any
) -> None:
    """Modules that are called with x."""
    head = f"--top{top}" if top else ""
    OPERATORS(
        name, weight,
        *(f"{head}\n--init\nself.l{{n}} = {text}\n--forward\n{{y}} = self.l{{n}}({before}){after}" for text in texts),
        **options,
    )


modules("linear", 6, *(f"nn.Linear({{w}}, {{{{w}}|4|6|5|8|3}}{bias})" for bias in ("", "", ", bias=False")))

modules("mlp", 6, *(
    f"nn.Sequential(nn.Linear({{w}}, {{k:=8|12|5|6|7|4|16|3}}), nn.{act}(), nn.Linear({{k}}, {{w}}))"
    for act in ("GELU", "ReLU", "SiLU", "Tanh")
))

WEIGHT = "self.p%s{n} = nn.Parameter(torch.randn(%s) / 3)"
OPERATORS("matmul", 5, *(
    "--init\n" + "\n".join(WEIGHT % (letter, shape) for letter, shape in zip("ab", shapes, strict=False))
    + f"\n--forward\n{{y}} = {text}"
    for text, *shapes in (
        ("{x} @ self.pa{n}", "{w}, {w}"),
        ("self.pa{n} @ {x}", "{l}, {l}"),
        ("torch.einsum('...i,ij,kj->...k', {x}, self.pa{n}, self.pa{n})", "{w}, {w}"),
        ("F.linear({x}, self.pa{n}) @ self.pa{n}", "5, {w}"),
        ("torch.einsum('...ij,ik->...kj', {x}, self.pa{n})", "{l}, {l}"),
        ("({x} @ self.pa{n}.t()) @ self.pb{n}.t() + {x}", "2, {w}", "{w}, 2"),
        ("F.linear({x}, self.pa{n}.t().contiguous())", "{w}, {w}"),
        ("torch.softmax({x} @ {x}.mT, -1) @ ({x} * self.pa{n})", "{w}"),
        ("torch.einsum('...i,pij,...j->...p', {x}, self.pa{n}, {x})", "4, {w}, {w}"),
    )
))

ATTENTION = """
class Attention(nn.Module):
    def __init__(self, width, heads, key_heads, mask, fused):
        super().__init__()
        self.heads, self.key_heads, self.mask, self.fused = heads, key_heads, mask, fused
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, key_heads * width // heads) for _ in range(2))

    def forward(self, x):
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (layer(x).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for layer in (self.key, self.value))
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.mask == "tensor" else None
        if self.fused:
            causal, grouped = self.mask == "causal", self.heads != self.key_heads
            mixed = F.scaled_dot_product_attention(q, k, v, allowed, is_causal=causal, enable_gqa=grouped)
        else:
            k, v = (t.repeat_interleave(self.heads // self.key_heads, 1) for t in (k, v))
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -math.inf)
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))
"""
modules(
    "attention", 4,
    "Attention({w}, {k:=1|2|3|4}, {1|{k}|{k}}, {''|'causal'|'tensor'}, {True|False})",
    top=ATTENTION,
)
modules(
    "torch's attention", 1,
    "nn.MultiheadAttention({w}, {1|2|3}, batch_first=True)", before="{x}, {x}, {x}, need_weights={True|False}",
    after="[0]",
)

SWAPPED = """
class Swapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, -1).contiguous()).transpose(1, -1)
"""
modules(
    "a layer of torch's transformer", 1,
    "nn.TransformerEncoderLayer({w}, 1, 8, dropout={0.0|0.1}, batch_first=True, norm_first={True|False})",
)
OPERATORS("fused attention", 2, *(
    f"{{y}} = F.scaled_dot_product_attention({{x}}[None], {{x}}[None].sin(), {{x}}[None]{more})[0]"
    for more in ("", ", is_causal=True", ", dropout_p=0.3", ", torch.ones({l}, {l}, dtype=torch.bool).tril()",
                 ", torch.arange({l}, dtype={x}.dtype).expand({l}, {l})", ", scale=0.5")
))

modules(
    "norm", 5,
    "nn.LayerNorm({w})", "nn.RMSNorm({w})", "nn.LayerNorm(({l}, {w}))", "Swapped(nn.GroupNorm(1, {w}))",
    "Swapped(nn.BatchNorm{k:=1|2}d({w}))", "Swapped(nn.BatchNorm{1|2}d({w}, momentum=0.3, affine=False))",
    "Swapped(nn.BatchNorm{1|2}d({w}, momentum=None))", "nn.BatchNorm1d({w}{|, momentum=None|, track_running_stats=False})",
    "Swapped(nn.InstanceNorm1d({w}, affine=True))", "Swapped(nn.InstanceNorm1d({w}, track_running_stats=True))",
    top=SWAPPED,
)

modules(
    "conv of a sequence", 2,
    "Swapped(nn.Conv1d({w}, 4, 3, padding=1))", "Swapped(nn.Conv1d({w}, {w}, 3, padding=1, groups={w}))",
    "Swapped(nn.Conv1d({w}, {w}, 3, padding=2, dilation=2, bias=False))",
    "Swapped(nn.Sequential(nn.Conv1d({w}, {w}, 2, stride=2), nn.Upsample(scale_factor=2)))",
    "Swapped(nn.ConvTranspose1d({w}, 5, 2, stride=2))", "Swapped(nn.AvgPool1d(3, stride=1, padding=1))",
    top=SWAPPED,
)

modules(
    "conv of an image", 2,
    "Swapped(nn.Conv2d({w}, 4, 3, padding=1))", "Swapped(nn.Conv2d({w}, {w}, 3, padding=1, groups={w}))",
    "Swapped(nn.Conv2d({w}, 6, 1))", "Swapped(nn.ConvTranspose2d({w}, 5, 2, stride=2))",
    "Swapped(nn.MaxPool2d(3, stride=1, padding=1))", "Swapped(nn.Sequential(nn.AvgPool2d(2), nn.Upsample(scale_factor=2)))",
    top=SWAPPED,
)

LOOKUP = "--init\nself.t{n} = nn.Embedding({k:=7|4|11|5}, {w})\n--forward\n%s"
ROW_NUMBERS = "(torch.arange({x}.shape[1]) * 3 + {n}) % {k}"
OPERATORS("lookup", 3, *(LOOKUP % text.replace("ROWS", ROW_NUMBERS) for text in (
    "{y} = {x} + F.embedding(ROWS, self.t{n}.weight{|, padding_idx=0})",
    "{y} = {x} * self.t{n}.weight[ROWS]",
    "{y} = {x} + self.t{n}.weight.index_select(0, ROWS)",
)), when=lambda x: x.dim() == 3)

modules(
    "recurrent", 4,
    "nn.{LSTM|GRU|RNN}({w}, {4|5|6}, {1|2}{|, bidirectional=True}{|, batch_first=True})",
    "nn.{LSTM|GRU|RNN}({w}, {4|5|6}, {2|3}, dropout={0.4|0.9}{|, bidirectional=True}{|, batch_first=True})",
    "nn.LSTM({w}, 6, proj_size=3)",
    after="[0]", when=lambda x: max(x.shape[:-1]) <= 5,  # each step is operators of its own
)

OPERATORS("cell", 1, """
--init
self.l{n} = nn.{GRUCell|RNNCell}({w}, {w})
--forward
u{n} = {x}.new_zeros({x}.shape[0], {w})
v{n} = []
for t in range(min(4, {x}.shape[1])):
    u{n} = self.l{n}({x}[:, t], u{n})
    v{n}.append(u{n})
{y} = torch.stack(v{n}, 1)
""", """
--init
self.l{n} = nn.LSTMCell({w}, 5)
--forward
u{n} = None
for row in {x}.unbind(1)[:4]:
    u{n} = self.l{n}(row, u{n})
{y} = u{n}[0]
""", when=lambda x: x.dim() == 3)

expressions(
    "random numbers", 5,
    "F.dropout({x}, {0.5|0.2}, self.training)", "{x} + torch.rand_like({x})", "{x} * torch.bernoulli(torch.full_like({x}, 0.5))",
    "F.dropout({x}, 0.5, training=True)", "{x} * torch.randn({w}, dtype={x}.dtype)", "F.alpha_dropout({x}, 0.2, True)",
    "F.rrelu({x}, training=True)", "{x} * torch.empty_like({x}).{exponential_()|uniform_(-1, 1)|bernoulli_(0.4)|normal_()}",
    "{x}[torch.randperm({r})]", "{x} + torch.normal({x}.detach(), 0.5)", "{x} * F.gumbel_softmax({x}, hard={True|False})",
    "{x} * torch.randint(0, 3, ({w},))", "{x} * torch.bernoulli({x}.sigmoid().detach())",
    "{x} + torch.distributions.Normal({x}, 0.3).rsample()",
)

modules("dropout", 5, "nn.Dropout(0.3)", "nn.Dropout(0.0)", "nn.AlphaDropout(0.2)", "nn.Dropout1d(0.4)", "nn.RReLU()",
        "nn.Sequential(nn.Linear({w}, 6), nn.Dropout(0.4, inplace=True), nn.Linear(6, {w}))")
