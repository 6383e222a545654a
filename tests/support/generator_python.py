"""What Python does in forward and around it: a kind of statement an entry (`generator_kinds` says what the fields mean).

Each is code that people write. A kind need not be supported: a program that holds it is equal to eager or refused.
"""

# A line of a program is a line here, however many ways to write it stand in it.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from generator_kinds import Table

PYTHON = Table()

# --------------------------------------------------------------------------------------------------------- grad modes

PYTHON("no_grad", 4, """
with torch.no_grad():
    {body:x}
{y} = {x} {+|*} {b}
""", """
--top
@torch.no_grad()
def target{n}(a):
    return {f:a}
--forward
{y} = {x} + target{n}({x})
""")

PYTHON("enable_grad in no_grad", 3, """
with torch.no_grad():
    u{n} = {f:x}
    with torch.enable_grad():
        {body:x}
{y} = {b} + u{n}
""")

PYTHON("set_grad_enabled", 3, """
torch.set_grad_enabled({False|not self.training|True})
u{n} = {f:x}
torch.set_grad_enabled(True)
{y} = {x} * u{n}
""", """
with torch.set_grad_enabled({False|self.training|{x}.shape[0] > 4}):
    {body:x}
{y} = {x} + {b}
""")

PYTHON("inference_mode", 2, """
with torch.inference_mode():
    u{n} = {f:x}
{y} = {x} * u{n}.clone()
""")

PYTHON("detach", 3, "{y} = {x} + {f:x}.detach()", "{y} = {x} * {z}.detach()",
       "{y} = ({x}.round() - {x}).detach() + {x}", "{y} = {x}.detach() * 0.5 + {z} - {z}.detach()")

PYTHON("asks for grad mode", 2, """
u{n} = {f:x}
if {torch.is_grad_enabled()|u{n}.requires_grad|u{n}.grad_fn is not None|not u{n}.is_leaf|self.training}:
    {body:x}
    {y} = {b} + u{n}
else:
    {y} = u{n} * 3
""")

PYTHON("with the grad mode of a generator", 1, """
--top
@contextlib.contextmanager
def quiet{n}(on):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(on)
    try:
        yield
    finally:
        torch.set_grad_enabled(before)
--forward
with quiet{n}({False|True}):
    {body:x}
{y} = {x} + {b}
""")

# ------------------------------------------------------------------------------------------------- freezing in forward

PYTHON("frozen for a call", 5, """
--init
self.l{n} = {m}
--forward
self.l{n}.requires_grad_(False)
u{n} = self.l{n}({x})
self.l{n}.requires_grad_(True)
{y} = u{n} {+ self.l{n}({x}.detach())|- self.l{n}({z}).sin()|}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
for p in self.l{n}.parameters():
    p.requires_grad = False
try:
    u{n} = self.l{n}({x})
finally:
    for p in self.l{n}.parameters():
        p.requires_grad = True
{y} = u{n} + {x}{| + 0.1 * self.l{n}.weight.mean()}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
u{n} = self.l{n}({x})
self.l{n}.{weight|bias}.requires_grad_(False)
v{n} = self.l{n}(u{n}.tanh())
self.l{n}.{weight|bias}.requires_grad_(True)
{y} = u{n} + v{n}
""")

PYTHON("left frozen", 1, """
--init
self.l{n} = {m}
--forward
{y} = self.l{n}({x}){| + {x}}
self.l{n}.requires_grad_(False)
""")

PYTHON("a submodule frozen at the start", 2, """
--init
self.l{n} = {m}
--make
model.l{n}.requires_grad_(False)
--forward
{y} = self.l{n}({x}) + {x}
""")

PYTHON("weights detached", 2, """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
{y} = F.linear({x}, self.l{n}.weight.detach(), self.l{n}.bias) + {0|self.l{n}({x}.detach())}
""")

PYTHON("two players", 2, """
--init
self.g{n}, self.d{n} = nn.Linear({w}, {w}), nn.Linear({w}, 1)
--forward
u{n} = self.g{n}({x}).tanh()
self.d{n}.requires_grad_(False)
v{n} = -self.d{n}(u{n}).mean()
self.d{n}.requires_grad_(True)
v{n} = v{n} + self.d{n}(u{n}.detach()).mean() - self.d{n}({x}.detach()).square().mean()
{y} = {x} + v{n}
""")

# ------------------------------------------------------------------------------------------------------ writes in place

COPY = "{{x}.clone()|{x} * 1|torch.zeros_like({x}) + {x}|{x}.new_empty({x}.shape).copy_({x})|torch.empty_like({x}).copy_({x})}"
"""A tensor of one's own that may be written."""

VIEW = (
    "{.transpose(0, 1)|[:, 1:]|[..., ::2]|.narrow(0, 0, 1)|.select(-1, 0)|.view(-1)|.unsqueeze(0)|.diagonal()|.movedim(0, -1)"
    "|.chunk(2)[0]|.split(1)[-1]|.unbind(0)[-1]|.mT|[0]|[None]|.flatten()|.unfold(0, 1, 1)|.squeeze()|[...]|[:, 0]|[-1:]"
    "|.view({x}.shape)|.view_as({x})|.swapaxes(0, 1)|.detach()|.data}"
)

WRITE = (
    "{.mul_(0.5)|.add_(1.0)|.zero_()|.fill_(0.3)|.clamp_(-0.5, 0.5)|.sigmoid_()|.tanh_()|.relu_()|.neg_()|.sub_({x}.mean())"
    "|.add_({x}.sum() * 0.1)|.index_fill_(0, torch.tensor([0]), 0.2)|[0] = 1.0|[..., -1] = {x}.mean()|.div_(2).exp_()"
    "|.masked_fill_(v{n}.detach() > 0, 0.1)|.copy_(v{n}.flip(0))|.addcmul_(v{n}, v{n}, value=0.1)|.lerp_(v{n}.sin(), 0.5)"
    "|.index_put_((torch.tensor([0]),), torch.tensor(0.5, dtype=torch.float64), accumulate={True|False})"
    "|.index_add_(0, torch.tensor([0]), v{n}[:1].clone())|[v{n}.detach() > 0.2] = 0.1|.copy_({x}.sum())|.pow_(2)|.cumsum_(0)"
    "|.scatter_(0, torch.zeros_like(v{n}, dtype=torch.long)[:1], 0.3)|.round_()|.triu_()|.renorm_(2, 0, 1.0)|.square_()}"
)

PYTHON("a write through a view", 8, f"""
u{{n}} = {COPY}
v{{n}} = u{{n}}{VIEW}
v{{n}}{WRITE}
{{y}} = u{{n}}
""")

PYTHON("a write through a view of a view", 8, f"""
u{{n}} = {COPY}
v{{n}} = u{{n}}{VIEW}{VIEW}{{|{VIEW}}}
v{{n}}{WRITE}
{{y}} = u{{n}}
""", f"""
u{{n}} = {COPY}
v{{n}} = u{{n}}{VIEW}{VIEW}
w{{n}} = v{{n}}.sum()
v{{n}}{WRITE}
u{{n}}{VIEW}.{{mul_(0.7)|add_(w{{n}})|sin_()}}
{{y}} = u{{n}} + w{{n}}
""", f"""
u{{n}} = {COPY}
v{{n}} = u{{n}}{VIEW}
u{{n}}.{{mul_(2)|add_(1)|cos_()}}
v{{n}}{WRITE}
{{y}} = u{{n}} * 0.5 + v{{n}}.sum()
""")

PYTHON("a write into a part", 4,
       f"u{{n}} = {COPY}\nu{{n}}[:, -1] = {{x}}[:, 0] * 2\n{{y}} = u{{n}}",
       f"u{{n}} = {COPY}\nu{{n}}[..., 1:] += {{x}}[..., :-1]\n{{y}} = u{{n}}",
       f"u{{n}} = {COPY}\nu{{n}}[:, ::2].mul_(0.5)\n{{y}} = u{{n}}",
       f"u{{n}} = {COPY}\nu{{n}}.index_add_(-1, torch.arange({{w}}).flip(0), {{x}}, alpha=0.5)\n{{y}} = u{{n}}",
       f"u{{n}} = {COPY}\nu{{n}}.view(-1)[: {{x}}.numel() // 2].zero_()\n{{y}} = u{{n}}",
       f"u{{n}} = {COPY}\nu{{n}}[torch.arange({{r}}).flip(0)] = {{f:x}}\n{{y}} = u{{n}}",
       f"u{{n}} = {COPY}\nu{{n}}[:, [0, -1]] *= {{x}}[:, :1].sigmoid()\n{{y}} = u{{n}}",
       f"u{{n}} = {COPY}\nu{{n}}[0], u{{n}}[-1] = u{{n}}[-1].clone(), {{x}}[0] * 2\n{{y}} = u{{n}}")

PYTHON("rows filled in a loop", 3, """
u{n} = {torch.zeros_like({x})|{x}.new_empty({x}.shape)|torch.empty_like({x})}
for i in range({r}):
    u{n}[i] = {x}[i] * (i + 1) {|+ (u{n}[i - 1].detach() if i else 0)|+ u{n}[:i].sum()}
{y} = u{n}
""", """
u{n} = {x}.new_zeros({r}, {w}, 2)
u{n}[..., 0] = {x}.flatten(1, -2).mean(1) if {x}.dim() > 2 else {x}
u{n}.select(-1, 1).copy_(u{n}[..., 0] * 2)
{y} = {x} + u{n}.mean()
""")

PYTHON("the value itself is written", 4, "{y} = {x}.{add_(1)|mul_(0.5)|tanh_()|clamp_(-1, 1)|sigmoid_()|neg_()}",
       "{x} += {z}.mean()\n{y} = {x}", "{x} *= 2\n{y} = {x}", "{y} = F.relu({x}, inplace=True)",
       "{y} = F.{hardtanh|leaky_relu|elu|silu}({x}, inplace=True)", "u{n} = {x}[0]\n{x}.mul_(0.5)\n{y} = {x} + u{n}",
       "with torch.no_grad():\n    {x}.mul_(0.5)\n{y} = {x}", "{x}.data.mul_(0.5)\n{y} = {x} + 0",
       "u{n} = {x}.detach()\nu{n}.add_(0.5)\n{y} = {x} + u{n}")

PYTHON("out=", 3, """
with torch.no_grad():
    u{n} = torch.empty_like({x})
    torch.{sin({x}, |add({x}, {z}, |mul({x}, 2, |cumsum({x}, 0, |clamp({x}, -0.5, 0.5, }out={u{n}|u{n}.view({x}.shape)|u{n}[...]})
{y} = {x} + u{n}
""", """
u{n} = torch.zeros({r}, dtype=torch.float64)
torch.sum({x}.detach().flatten(1), 1, out=u{n})
{y} = {x} + u{n}.mean()
""")

PYTHON("metadata in place", 2,
       f"u{{n}} = {COPY}\nu{{n}}.transpose_(0, 1)\nu{{n}}.mul_(0.5)\n{{y}} = u{{n}}.transpose(0, 1)",
       f"u{{n}} = {COPY}\nu{{n}}.unsqueeze_(0).add_(1)\n{{y}} = u{{n}}.squeeze(0)",
       f"u{{n}} = {COPY}\nu{{n}}.detach_()\n{{y}} = {{x}} + u{{n}}",
       f"u{{n}} = {COPY}\nu{{n}}.requires_grad_(False) if u{{n}}.is_leaf else None\n{{y}} = {{x}} + u{{n}}",
       f"u{{n}} = {COPY}\nv{{n}} = torch.as_strided(u{{n}}, ({{r}},), (1,))\nv{{n}}.mul_(3)\n{{y}} = u{{n}}",
       f"u{{n}} = {COPY}\nu{{n}}.swapdims_(0, 1).mul_(2)\n{{y}} = {{x}} + u{{n}}.sum()")

PYTHON("data of a tensor", 3, """
u{n} = {f:x}
u{n}.data{ = u{n}.data * 0.5|.mul_(0.5)|.copy_({x}.data)|[0] = 0|.clamp_(-0.3, 0.3)}
{y} = {x} + u{n}
""", """
{y} = {x} * {x}.data.{abs().mean()|norm()|sin()|max()}
""")

PYTHON("foreach", 1, """
u{n} = [{x} * 1, {z} * 2]
torch._foreach_{add_(u{n}, 1.0)|mul_(u{n}, 0.5)|sin_(u{n})}
{y} = u{n}[0] + u{n}[1].tanh()
""")

PYTHON("a dtype in place", 1, """
u{n} = {x}.to(torch.float32)
u{n}{[0] = 1|.mul_(0.5)|[:, ::2] += 1}
{y} = u{n}.to({x}.dtype) + {x}
""")

# -------------------------------------------------------------------------------------- writes into parameters, buffers

PYTHON("a parameter is written", 5, """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
with torch.no_grad():
    self.l{n}.weight{.clamp_(-0.2, 0.2)|.mul_(0.99)|[0].mul_(0.9)|.t()[:, 1:].add_(0.01)|.copy_(self.l{n}.weight.tanh())|.div_(self.l{n}.weight.norm() + 1)|.renorm_(2, 0, 0.5)|.view(-1)[::2].zero_()}
{y} = self.l{n}({x}) + {x}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
self.l{n}.weight.data{.clamp_(-0.2, 0.2)| = self.l{n}.weight.data.clamp(-0.2, 0.2)|.mul_(0.9)|[:, 0] = 0.1|.copy_(self.l{n}.weight.data.t())}
{y} = self.l{n}({x}) + {x}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
{y} = self.l{n}({x}) + {x}
with torch.no_grad():
    self.l{n}.bias.{mul_(0.9)|add_({x}.mean())|copy_({x}.reshape(-1, {w}).mean(0))}
""")

PYTHON("nn.init in forward", 4, """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
nn.init.{constant_(self.l{n}.bias, 0.5)|zeros_(self.l{n}.bias)|ones_(self.l{n}.bias)|normal_(self.l{n}.bias)|uniform_(self.l{n}.bias)|eye_(self.l{n}.weight)|kaiming_uniform_(self.l{n}.weight)|xavier_normal_(self.l{n}.weight)|trunc_normal_(self.l{n}.weight, std=0.1)}
{y} = self.l{n}({x}) + {x}
""", """
u{n} = {f:x}
v{n} = u{n}.{sin()|clone()}
nn.init.{constant_(v{n}, 0.3)|zeros_(v{n})|normal_(v{n}, 0.0, 0.1)}
{y} = u{n} * v{n} + {x}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
u{n} = self.l{n}({x}.detach())
self.l{n}.reset_parameters()
{y} = {x} + u{n} - self.l{n}({x}).detach()
""")

PYTHON("a buffer is counted up", 3, """
--init
self.register_buffer("b{n}", torch.zeros(({|2}{|,})))
--forward
self.b{n} += 1
{y} = {x} * self.b{n}.sum()
""", """
--init
self.register_buffer("b{n}", torch.zeros((), dtype=torch.long){|, persistent=False})
--forward
self.b{n}.add_(1)
{y} = {x} / self.b{n}
""")

PYTHON("a moving average in a buffer", 5, """
--init
self.register_buffer("b{n}", torch.zeros({w}))
--forward
with torch.no_grad():
    self.b{n}.mul_(0.9).add_({x}.flatten(0, -2).mean(0), alpha=0.1)
{y} = {x} - self.b{n}
""", """
--init
self.register_buffer("b{n}", torch.zeros({w}))
--forward
self.b{n} = self.b{n} * 0.5 + {x}.detach().flatten(0, -2).mean(0)
{y} = {x} - self.b{n}
""", """
--init
self.register_buffer("b{n}", torch.ones({w}))
--forward
u{n} = self.b{n}{.clone()|}
{y} = {x} * self.b{n}.cos() + u{n}
self.b{n}{.fill_(2.0)|.add_(1)|.copy_({x}.detach().flatten(0, -2).amax(0))|[0] = 0.5|.view(-1)[::2] *= 2|.data = self.b{n} * 2}
""", """
--init
self.register_buffer("b{n}", torch.ones({w}))
--forward
if self.training:
    self.b{n}.lerp_({x}.detach().flatten(0, -2).abs().amax(0), 0.1)
{y} = {x} / (self.b{n} + 1)
""")

PYTHON("a buffer is written behind autograd's back", 3, """
--init
self.register_buffer("b{n}", torch.ones({w}))
--forward
self.b{n}.{data.mul_(0.9)|detach().add_(0.1)|data.copy_({x}.detach().flatten(0, -2).mean(0))|data[0] = 0.5|data.view(-1)[::2].mul_(2)}
{y} = {x} * self.b{n}
""", """
--init
self.register_buffer("b{n}", torch.ones({w}))
--forward
{y} = {x} * self.b{n}
self.b{n}.{data.mul_(0.9)|detach().add_(0.1)|data.copy_({x}.detach().flatten(0, -2).mean(0))}
""")

PYTHON("a tensor that is no buffer is written", 4, """
--init
self.t{n} = torch.ones({w})
--forward
self.t{n}.{data.mul_(0.9)|detach().add_(0.1)|view(-1)[::2].mul_(2)|mul_(0.9)|data.copy_({x}.detach().flatten(0, -2).mean(0))|data[0] = 0.5|unsqueeze(0).add_(1)|expand(2, {w})[0].mul_(0.5)}
{y} = {x} * self.t{n}
""", """
--init
self.t{n} = [torch.ones({w}), {"a": torch.ones({w}).numpy()}]
--forward
{self.t{n}[0].data.mul_(0.9)|torch.from_numpy(self.t{n}[1]["a"])[:1].add_(1)|self.t{n}[0][0] = 2|torch.as_tensor(self.t{n}[1]["a"]).view(1, -1).mul_(2)}
{y} = {x} * self.t{n}[0] + torch.from_numpy(self.t{n}[1]["a"])
""", """
--top
T{n} = torch.ones({w})
def f{n}(a, held=torch.ones({w})):
    {held|T{n}}.{data.mul_(0.9)|view(-1)[0].add_(1)|detach()[0] = 3}
    return a * held + T{n}
--forward
{y} = f{n}({x})
""", """
--init
self.register_buffer("b{n}", torch.ones({w}))
self.v{n} = self.b{n}{[:1]|.data|.view(1, -1)}
--forward
self.{v{n}|b{n}}.{data|detach()|view(-1)}.mul_(0.9)
{y} = {x} * self.b{n} + self.v{n}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
self.v{n} = self.l{n}.{weight|bias}.{data|detach()}
--forward
{self.v{n}.mul_(0.9)|self.v{n}[0].data.add_(0.1)|pass}
{y} = self.l{n}({x}) + self.v{n}{[0]|}.sum()
""")

PYTHON("an array on the memory of a tensor", 3, """
--init
self.t{n} = torch.ones({w}).double()
--forward
a{n} = {self.t{n}.numpy()|np.asarray(self.t{n}.detach())|self.t{n}[:2].numpy()|self.t{n}.numpy().copy()}
a{n}{[0] = 2|[:] = a{n} * 0.9|.fill(0.5)|.sort()}
{y} = {x} * self.t{n}
""", """
a{n} = np.ones({w})
u{n} = torch.from_numpy(a{n}){|.clone()|* 2}
{a{n}[0] = 3|a{n} *= 0.5|a{n} = a{n} * 2}
{y} = {x} * u{n} + torch.{from_numpy|tensor}(a{n})
""", """
u{n} = torch.arange({w}, dtype=torch.float64)
a{n} = u{n}.numpy(){|.copy()}
a{n} {+|*}= 0.5
{y} = {x} + {u{n}|torch.from_numpy(a{n})|u{n}.sum().item()}
""")

PYTHON("a queue in a buffer", 2, """
--init
self.register_buffer("b{n}", torch.randn(4, {w}))
--forward
with torch.no_grad():
    self.b{n}[1:] = self.b{n}[:-1].clone()
    self.b{n}[0] = {x}.flatten(0, -2).mean(0)
{y} = {x} + self.b{n}.mean(0)
""", """
--init
self.register_buffer("b{n}", torch.randn(4, {w}))
--forward
self.b{n} = torch.cat([{x}.detach().flatten(0, -2)[:1], self.b{n}[:-1]])
{y} = {x} + ({x} @ self.b{n}.t()).softmax(-1) @ self.b{n}
""", """
--init
self.register_buffer("b{n}", torch.randn(4, {w}))
self.register_buffer("at{n}", torch.zeros(1, dtype=torch.long))
--forward
u{n} = int(self.at{n})
self.b{n}[u{n}] = {x}.detach().flatten(0, -2).mean(0)
self.at{n}[0] = (u{n} + 1) % 4
{y} = {x} + self.b{n}.sum(0)
""")

PYTHON("an average of weights", 3, """
--init
self.l{n} = nn.Linear({w}, {w})
self.register_buffer("b{n}", torch.zeros({w}, {w}))
--forward
with torch.no_grad():
    self.b{n}.lerp_(self.l{n}.weight, 0.1)
{y} = self.l{n}({x}) - F.linear({x}, self.b{n})
""", """
--init
self.l{n} = nn.Linear({w}, {w})
self.t{n} = copy.deepcopy(self.l{n}).requires_grad_(False)
--forward
with torch.no_grad():
    for p, q in zip(self.t{n}.parameters(), self.l{n}.parameters()):
        p{.mul_(0.9).add_(q, alpha=0.1)|.lerp_(q, 0.2)|.data.copy_(p.data * 0.9 + q.data * 0.1)|.data = p.data * 0.9 + q.data * 0.1}
    u{n} = self.t{n}({x})
{y} = self.l{n}({x}) - u{n}
""")

# ----------------------------------------------------------------------------------------------------- inner gradients

LAYER = "--init\nself.l{n} = {m}\n--forward\n"

PYTHON("autograd.grad of an input", 5, LAYER + """
u{n} = {{x}.detach().requires_grad_()|{x}|{x}.clone()|{x} * 1}
v{n}, = torch.autograd.grad(self.l{n}(u{n}).{square().mean()|sin().sum()}, u{n}{|, create_graph=True|, retain_graph=True})
{y} = {x} + v{n}
""", LAYER + """
with torch.enable_grad():
    u{n} = {x}.detach().requires_grad_(True)
    v{n}, = torch.autograd.grad(self.l{n}(u{n}), u{n}, grad_outputs=torch.ones_like({x}), create_graph={self.training|True|False})
{y} = {x} - 0.1 * v{n}
""")

PYTHON("a gradient penalty", 4, LAYER + """
u{n} = {{x}.detach().requires_grad_()|{x}|{x}.clone().requires_grad_(True)}
v{n}, = torch.autograd.grad(self.l{n}(u{n}).tanh().sum(), u{n}, create_graph=True)
{y} = {x} + {((v{n}.norm(dim=-1) - 1) ** 2).mean()|v{n}.square().sum()|v{n}.abs().mean()}
""", LAYER + """
u{n} = torch.autograd.grad(self.l{n}({x}).sin().mean(), list(self.l{n}.parameters()), create_graph=True)
{y} = {x} + sum(g.square().sum() for g in u{n})
""")

PYTHON("steps within a step", 5, """
--init
self.w{n} = nn.Parameter(torch.randn({w}, {w}) / 3)
--forward
w{n} = self.w{n}
for _ in range({1|2|3}):
    u{n} = F.linear({{x}|{x}.detach()|{f:x}}, w{n}).{square().mean()|sin().sum()|softplus().mean()}
    g{n}, = torch.autograd.grad(u{n}, w{n}, {create_graph=True|create_graph=False, retain_graph=True|retain_graph=True})
    w{n} = w{n} - 0.1 * g{n}
{y} = F.linear({x}, w{n}) + {x}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
u{n} = torch.autograd.grad(self.l{n}({x}).square().mean(), tuple(self.l{n}.parameters()){|, create_graph=True}, retain_graph=True)
v{n} = {k: p - 0.1 * g for (k, p), g in zip(self.l{n}.named_parameters(), u{n})}
{y} = torch.func.functional_call(self.l{n}, v{n}, ({x},))
""")

PYTHON("a gradient that may be None", 1, LAYER + """
u{n} = {f:x}.detach().requires_grad_()
v{n} = torch.autograd.grad(self.l{n}({x}).sum() {|+ u{n}.sum()}, [u{n}, {x}], allow_unused=True{|, create_graph=True|, retain_graph=True})
{y} = {x} + sum(g.mean() for g in v{n} if g is not None)
""")

PYTHON("backward in forward", 5, LAYER + """
self.l{n}({x}.detach()).square().mean().backward()
{y} = {x} + self.l{n}({x}){.detach()|}
""", LAYER + """
u{n} = self.l{n}({x})
u{n}.square().mean().backward(retain_graph=True)
{y} = {{x}|{x}.detach()} + u{n}{.detach()|}
""", LAYER + """
u{n} = {x}.detach().requires_grad_()
self.l{n}(u{n}).sin().mean().backward()
{y} = {x} + u{n}.grad
""", LAYER + """
torch.autograd.backward([self.l{n}({x}.detach()).sum(), self.l{n}({x}.detach()).square().mean()]{|, inputs=[next(self.l{n}.parameters())]})
{y} = {x} + self.l{n}({x})
""", LAYER + """
self.l{n}({x}.detach()).square().mean().backward()
self.l{n}.zero_grad({|set_to_none=False})
{y} = {x} + self.l{n}({x})
""")

PYTHON("an optimizer's step in forward", 1, LAYER + """
u{n} = torch.optim.SGD(self.l{n}.parameters(), lr=0.1)
self.l{n}({x}.detach()).square().mean().backward()
u{n}.step()
u{n}.zero_grad()
{y} = {x} + self.l{n}({x}).detach()
""")

PYTHON("torch.func.grad", 4, LAYER + """
{y} = {x} + torch.func.grad(lambda a: self.l{n}(a).sin().sum())({x})
""", LAYER + """
u{n}, v{n} = torch.func.grad_and_value(lambda a: self.l{n}(a).square().mean())({x})
{y} = {x} + u{n} * v{n}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
def f{n}(parameters, a):
    return torch.func.functional_call(self.l{n}, parameters, (a,)).square().mean()
u{n} = torch.func.grad(f{n})(dict(self.l{n}.named_parameters()), {x})
{y} = F.linear({x}, self.l{n}.weight - u{n}["weight"], self.l{n}.bias - u{n}["bias"])
""", """
def f{n}(a):
    {body:a}
    return {b}.sin().sum()
{y} = {x} + torch.func.grad(f{n})({x})
""")

PYTHON("vmap", 4, LAYER + """
{y} = torch.func.vmap(lambda a: self.l{n}(a).tanh(){|, in_dims=1, out_dims=1|, chunk_size=2})({x})
""", """
def f{n}(a):
    {body:a}
    return {b}
{y} = torch.vmap(f{n})({x}[None])[0]
""", LAYER + """
{y} = {x} + torch.func.vmap(torch.func.grad(lambda a: self.l{n}(a).square().sum()))({x})
""", """
--init
self.w{n} = nn.Parameter(torch.randn(3, {w}, {w}) / 3)
--forward
{y} = {x} + torch.func.vmap(lambda w: F.linear({x}, w).sin())(self.w{n}).mean(0)
""")

PYTHON("jacobians", 3, LAYER + """
u{n} = torch.func.{jacrev|jacfwd}(lambda a: self.l{n}(a).tanh())({x}.reshape(-1, {w})[0])
{y} = {x} + u{n}.square().sum()
""", LAYER + """
u{n} = torch.func.hessian(lambda a: self.l{n}(a).sin().sum())({x}.reshape(-1, {w})[0])
{y} = {x} + u{n}.sum()
""", LAYER + """
u{n} = torch.autograd.functional.jacobian(lambda a: self.l{n}(a).tanh(), {x}.reshape(-1, {w})[0], create_graph={True|False})
{y} = {x} + u{n}.square().mean()
""")

PYTHON("jvp and vjp", 3, LAYER + """
_, u{n} = torch.func.jvp(lambda a: self.l{n}(a).tanh(), ({x},), ({torch.ones_like({x})|{x}.cos()|{z}},))
{y} = {x} + u{n}
""", LAYER + """
u{n}, f{n} = torch.func.vjp(lambda a: self.l{n}(a).tanh(), {x})
{y} = u{n} + f{n}({x}.cos())[0]
""", LAYER + """
u{n} = torch.autograd.functional.{hvp|vhp}(lambda a: self.l{n}(a).sin().sum(), {x}, torch.ones_like({x}), create_graph=True)[1]
{y} = {x} + u{n}
""", LAYER + """
with torch.autograd.forward_ad.dual_level():
    u{n} = torch.autograd.forward_ad.make_dual({x}, torch.ones_like({x}))
    v{n} = torch.autograd.forward_ad.unpack_dual(self.l{n}(u{n}).tanh()).tangent
{y} = {x} + v{n}
""")

# --------------------------------------------------------------------------------------------------------------- hooks

HOOK = (
    "{lambda g: g * 2|lambda g: g.clamp(-0.01, 0.01)|lambda g: None|lambda g: g + u{n}.detach()|lambda g: g / (g.norm() + 1)"
    "|lambda g: g.sign() * 0.1|lambda g: -g|lambda g: g.masked_fill(g > 0, 0.0)|torch.neg}"
)

PYTHON("a hook of a tensor", 6, f"""
u{{n}} = {{f:x}}
if u{{n}}.requires_grad:
    u{{n}}.register_hook({HOOK})
{{y}} = {{x}} + u{{n}}
""", f"""
u{{n}} = {{f:x}}
h{{n}} = u{{n}}.register_hook({HOOK})
u{{n}}.register_hook({HOOK})
{{|h{{n}}.remove()}}
{{y}} = {{x}} + u{{n}}
""", """
--init
self.register_buffer("b{n}", torch.zeros(()))
--forward
u{n} = {f:x}
def f{n}(g):
    self.b{n}{.copy_(g.norm())|.add_(g.abs().max())| += 1}
    return {None|g * 0.5}
u{n}.register_hook(f{n})
{y} = {x} + u{n}
""", """
u{n} = []
v{n} = {f:x}
v{n}.register_hook(lambda g: u{n}.append(g))
{z}.register_hook(lambda g: g * 0.5 if not u{n} else g + 0 * u{n}[0].sum())
{y} = {x} + v{n}
""")

PYTHON("a reversal of gradients", 1, """
u{n} = {f:x}
u{n}.register_hook(lambda g: -0.5 * g)
{y} = {x} + u{n}
""", """
u{n} = {f:x}
{y} = {x} + u{n}.detach() * 2 - u{n}
""")

PYTHON("a hook of autograd's node", 4, """
u{n} = {f:x}
u{n}.grad_fn.register_{hook(lambda gs, _: tuple(None if g is None else g * 2 for g in gs))|prehook(lambda gs: tuple(-g for g in gs))|hook(lambda gs, outs: None)}
{y} = {x} + u{n}
""", """
u{n} = {f:x}
v{n} = u{n}.grad_fn.next_functions[0][0]
v{n}.register_hook(lambda gs, _: tuple(None if g is None else 0.5 * g for g in gs))
{y} = {x} + u{n}
""")

PYTHON("hooks of several tensors", 1, """
u{n}, v{n} = {f:x}, {f:z}
torch.autograd.graph.register_multi_grad_hook((u{n}, v{n}), lambda gs: None)
{y} = u{n} + v{n}
""", """
u{n} = {f:x}
u{n}.retain_grad()
{y} = {x} + u{n}
""")

PYTHON("a hook of a parameter", 4, """
--init
self.l{n} = nn.Linear({w}, {w})
{|self.l{n}.weight.register_hook(lambda g: g * 0.5)}
--make
model.l{n}.{weight|bias}.register_hook({lambda g: g.clamp(-0.01, 0.01)|lambda g: g * 2|lambda g: torch.zeros_like(g)})
--forward
{y} = self.l{n}({x}) + {x}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--make
model.l{n}.weight.register_post_accumulate_grad_hook(lambda p: (p.grad.{mul_(0.5)|clamp_(-0.01, 0.01)}, None)[1])
--forward
{y} = self.l{n}({x}) + {x}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
self.l{n}.weight.register_hook(lambda g: g * 0.5)
{y} = self.l{n}({x}) + {x}
""")


def of_a_module(hook: str) -> tuple[str, str]:
    """A hook that the module's author registers, and that its user does."""
    text = "--init\nself.l{n} = {m}\n%s.l{n}.HOOK\n--forward\n{y} = self.l{n}({x}) + {x}".replace("HOOK", hook)
    return text % "self", text % "--make\nmodel"


PYTHON("a forward hook", 5,
       *of_a_module("register_forward_hook(lambda module, args, output: output * 2)"),
       *of_a_module("register_forward_hook(lambda module, args, output: None)"),
       *of_a_module("register_forward_hook(lambda module, args, output: output + args[0], prepend=True)"),
       *of_a_module("register_forward_hook(lambda module, args, kwargs, output: output.tanh(), with_kwargs=True)"),
       *of_a_module("register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))"),
       *of_a_module("register_forward_pre_hook(lambda m, args, kwargs: ((args[0].sin(),), kwargs), with_kwargs=True)"),
       """
--init
self.l{n} = {m}
self.v{n} = {}
self.l{n}.register_forward_hook(lambda module, args, output: self.v{n}.update(seen=output))
--forward
{y} = self.l{n}({x}) + {x}
{y} = {y} + self.v{n}["seen"].mean()
""")

PYTHON("a backward hook of a module", 5,
       *of_a_module("register_full_backward_hook(lambda module, inner, outer: tuple(None if g is None else g * 0.5 for g in inner))"),
       *of_a_module("register_full_backward_hook(lambda module, inner, outer: None)"),
       *of_a_module("register_full_backward_pre_hook(lambda module, outer: tuple(g.clamp(-0.01, 0.01) for g in outer))"),
       *of_a_module("register_full_backward_pre_hook(lambda module, outer: (outer[0] * 2,), prepend=True)"))

PYTHON("saved_tensors_hooks", 4, """
with torch.autograd.graph.{saved_tensors_hooks(lambda t: t, lambda t: t)|saved_tensors_hooks(lambda t: t.float(), lambda t: t.double())|save_on_cpu()|saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 0.5)|saved_tensors_hooks(lambda t: (t,), lambda t: t[0])|saved_tensors_hooks(lambda t: t.round(decimals=2), lambda t: t)}:
    {body:x}
{y} = {x} + {b}
""", """
u{n} = []
def f{n}(t):
    u{n}.append(t)
    return len(u{n}) - 1
with torch.autograd.graph.saved_tensors_hooks(f{n}, lambda k: u{n}[k]):
    {body:x}
{y} = {x} + {b}
""")

# ---------------------------------------------------------------------------------------------------- custom functions


def function(forward: str, backward: str, call: str = "{y} = Fn{n}.apply({x})", init: str = "") -> str:
    """An autograd.Function of x; `a` is what it takes, `g` the gradient of what it makes."""
    lines = ["--top", "class Fn{n}(torch.autograd.Function):", "    @staticmethod", f"    def forward(ctx, {forward}"]
    lines += ["", "    @staticmethod", f"    def backward(ctx, {backward}"]
    return "\n".join((*lines, *(["--init", init] if init else []), "--forward", call)).replace("; ", "\n        ")


SAVES = "ctx.save_for_backward(a); "
TAKES = "a, = ctx.saved_tensors; "

PYTHON("a function of one's own", 6,
       function("a): return a.round()", "g): return g"),
       function("a): return a.view_as(a)", "g): return -0.5 * g"),
       function("a):; " + SAVES + "return a.clamp(-1, 1)", "g):; " + TAKES + "return g * (a.abs() < 1) + 0.1 * g"),
       function("a):; " + SAVES + "return a * a", "g):; " + TAKES + "return 2 * a * g"),
       function("a, k):; ctx.k = k; return a * k", "g):; return g * ctx.k * 2, None", "{y} = Fn{n}.apply({x}, {0.5|2|True})"),
       function("a):; ctx.s = a.shape; return a.reshape(-1)", "g): return g.reshape(ctx.s)",
                "{y} = Fn{n}.apply({x}).reshape({x}.shape)"),
       function("a, w):; ctx.save_for_backward(a, w); return a @ w",
                "g):; a, w = ctx.saved_tensors; return g @ w.t() if ctx.needs_input_grad[0] else None, "
                "(a.flatten(0, -2).t() @ g.flatten(0, -2) if ctx.needs_input_grad[1] else None)",
                "{y} = Fn{n}.apply({x}, self.w{n})", "self.w{n} = nn.Parameter(torch.randn({w}, {w}) / 3)"),
       function("a):; ctx.a = a; return a.tanh()", "g): return g * (1 - ctx.a.tanh() ** 2)"),
       function("a):; out = a.sigmoid(); ctx.save_for_backward(out); return out",
                "g):; out, = ctx.saved_tensors; return g * out * (1 - out)"),
       function("a): return a.sin()", "g): return None", "{y} = {x} + Fn{n}.apply({x})"))

PYTHON("a function with several outputs", 4,
       function("a): return a.sin(), a.cos()", "g, h): return g * 2 - h", "u{n}, v{n} = Fn{n}.apply({x})\n{y} = u{n} {+ v{n}|}"),
       function("a):; ctx.set_materialize_grads(False); return a * 2, a + 1",
                "g, h): return (0 if g is None else g) + (0 if h is None else 3 * h)",
                "u{n}, v{n} = Fn{n}.apply({x})\n{y} = u{n} {+ v{n}|}"),
       function("a):; top, at = a.max(-1, keepdim=True); ctx.mark_non_differentiable(at); ctx.save_for_backward(at); "
                "ctx.shape = a.shape; return top, at",
                "g, _):; at, = ctx.saved_tensors; return g.new_zeros(ctx.shape).scatter_(-1, at, g)",
                "u{n}, v{n} = Fn{n}.apply({x})\n{y} = {x} + u{n} * v{n}"),
       function("a, k):; ctx.k = k; return a * k, k + 1", "g, _): return g * ctx.k, None",
                "u{n}, k{n} = Fn{n}.apply({x}, 2)\n{y} = u{n} * k{n}"),
       function("*rows):; return torch.stack(rows)", "g): return tuple(2 * g)",
                "{y} = Fn{n}.apply(*{x}.unbind(0))"))

PYTHON("a function that writes what it is given", 3,
       function("a):; ctx.mark_dirty(a); return a.mul_(2)", "g): return 2 * g", "{y} = Fn{n}.apply({x} {* 1|+ 0})"),
       function("a):; out = a.clone(); out[0] = 0; return out", "g):; g = g.clone(); g[0] = 0; return g"),
       function("a):; " + SAVES + "return a.exp()", "g):; " + TAKES + "return g.mul(a.exp()).clamp_(-1, 1)"))

PYTHON("a buffer written in backward", 4,
       function("a, b):; ctx.b = b; return a.clone()",
                "g):; ctx.b.copy_(torch.maximum(ctx.b * 0.9, g.abs().max())); return g / (ctx.b + 1), None",
                "{y} = Fn{n}.apply({x}, self.b{n})", 'self.register_buffer("b{n}", torch.full((), 1e-3))'),
       function("a, module):; ctx.module = module; return a.view_as(a)",
                "g):; ctx.module.b{n} += g.norm(); return g, None",
                "{y} = Fn{n}.apply({x}, self)", 'self.register_buffer("b{n}", torch.zeros(()))'),
       function("a, b):; ctx.b = b; b.add_(1); return a / b", "g):; ctx.b.mul_(0.5); return g / ctx.b, None",
                "{y} = Fn{n}.apply({x}, self.b{n})", 'self.register_buffer("b{n}", torch.ones(()))'))

PYTHON("backward in a backward", 4,
       function("a, f):; ctx.f = f; " + SAVES + "return f(a)",
                "g):; a = ctx.saved_tensors[0].detach().requires_grad_(); "
                "with torch.enable_grad():; "
                "    out = ctx.f(a); torch.autograd.backward(out, g); return a.grad, None",
                "{y} = Fn{n}.apply({x}, self.l{n})", "self.l{n} = {m}"),
       function("a, f, *weights):; ctx.f, ctx.weights = f, weights; " + SAVES + "return f(a)",
                "g):; a = ctx.saved_tensors[0].detach().requires_grad_(); "
                "with torch.enable_grad():; "
                "    out = ctx.f(a); a, *w = torch.autograd.grad(out, (a, *ctx.weights), g); return a, None, *w",
                "{y} = Fn{n}.apply({x}, self.l{n}, *self.l{n}.parameters())", "self.l{n} = {m}"))

PYTHON("a function with setup_context", 2, """
--top
class Fn{n}(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a):
        return a.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, g):
        a, = ctx.saved_tensors
        return g * a.cos() * 2
--forward
{y} = {Fn{n}.apply({x})|torch.vmap(Fn{n}.apply)({x})|{x} + torch.func.grad(lambda a: Fn{n}.apply(a).sum())({x})}
""", """
--top
class Fn{n}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * 3
--forward
{y} = Fn{n}.apply({x})
""")

PYTHON("a function that counts", 2,
       function("a):; Fn{n}.calls = getattr(Fn{n}, 'calls', 0) + 1; ctx.k = Fn{n}.calls; return a / ctx.k", "g): return g / ctx.k"),
       function("a, seen):; ctx.seen = seen; return a.clone()", "g):; ctx.seen.append(1); return g / len(ctx.seen), None",
                "{y} = Fn{n}.apply({x}, self.v{n})", "self.v{n} = []"))

# ------------------------------------------------------------------------------------------------- state that Python has

PYTHON("a counter", 4,
       "--init\nself.k{n} = 0\n--forward\nself.k{n} += 1\n{y} = {x} * self.k{n}",
       "--init\nself.k{n} = 0\n--forward\nself.k{n} += 1\n{y} = {x} * 2",
       "--init\nself.k{n} = [0]\n--forward\nself.k{n}[0] += 1\n{y} = {x} / self.k{n}[0]",
       "--init\nself.k{n} = 0\n--forward\nself.k{n} += 1\n{y} = {x} if self.k{n} < 2 else {x}.sin()",
       "--top\nTICKS{n} = [0]\n--forward\nTICKS{n}[0] += 1\n{y} = {x} / TICKS{n}[0]",
       "--top\nTICKS{n} = 0\ndef tick{n}():\n    global TICKS{n}\n    TICKS{n} += 1\n    return TICKS{n}\n--forward\n{y} = {x} / tick{n}()",
       "--forward\ntype(self).k{n} = getattr(type(self), 'k{n}', 0) + 1\n{y} = {x} / self.k{n}",
       "--init\nself.k{n} = itertools.{count(1)|cycle([1, 2])}\n--forward\n{y} = {x} / next(self.k{n})")

PYTHON("a function with state", 4, """
--top
def made{n}():
    k = 0
    def f(a):
        nonlocal k
        k += 1
        return a / k
    return f
--init
self.f{n} = made{n}()
--forward
{y} = self.f{n}({x})
""", """
--top
def f{n}(a, seen=[]):
    seen.append(1)
    return a / len(seen)
--forward
{y} = f{n}({x})
""", """
--top
def f{n}(a):
    f{n}.calls += 1
    return a / f{n}.calls
f{n}.calls = 0
--forward
{y} = f{n}({x})
""", """
--top
def numbers{n}():
    k = 1.0
    while True:
        yield k
        k *= 0.5
--init
self.g{n} = numbers{n}()
--forward
{y} = {x} * next(self.g{n})
""", """
--init
self.f{n} = functools.partial(lambda a, seen: (seen.append(1), a / len(seen))[1], seen=[])
--forward
{y} = self.f{n}({x})
""", """
--top
class Scale{n}:
    def __init__(self):
        self.k = 1
    def __call__(self, a):
        self.k {+= 1|= 2|= self.k}
        return a / self.k
--init
self.f{n} = Scale{n}()
--forward
{y} = self.f{n}({x})
""")

PYTHON("a cache", 4, """
--init
self.c{n} = {}
--forward
if {x}.shape not in self.c{n}:
    self.c{n}[{x}.shape] = torch.arange({w}) * {1.0|0.5}
{y} = {x} + self.c{n}[{x}.shape]
""", """
--top
@functools.lru_cache
def table{n}(size):
    return torch.linspace(0, 1, size, dtype=torch.float64)
--forward
{y} = {x} * table{n}({w})
""", """
--init
self.c{n} = None
--forward
if self.c{n} is None:
    self.c{n} = torch.ones({w}){|.cumsum(0)}
{y} = {x} + self.c{n}
""", """
--init
self.c{n} = None
--forward
if self.c{n} is None:
    self.c{n} = {x}.detach().mean()
{y} = {x} - self.c{n}
""", """
--init
self.w{n} = nn.Parameter(torch.ones({w}))
self.ready{n} = False
--forward
if not self.ready{n}:
    self.w{n}.data.copy_(1 / ({x}.detach().flatten(0, -2).abs().mean(0) + 1))
    self.ready{n} = True
{y} = {x} * self.w{n}
""")

PYTHON("a memory", 4,
       "--init\nself.v{n} = None\n--forward\n{y} = {x} if self.v{n} is None else {x} + self.v{n}\nself.v{n} = {x}.detach(){|.mean()|.clone()}",
       "--init\nself.v{n} = torch.zeros({w}, dtype=torch.float64)\n--forward\n{y} = {x} + self.v{n}\nself.v{n} = {x}.detach().flatten(0, -2).mean(0)",
       "--init\nself.v{n} = torch.zeros({w}, dtype=torch.float64)\n--forward\nself.v{n}.add_(1)\n{y} = {x} + self.v{n}",
       "--init\nself.v{n} = [0.5]\n--forward\nself.v{n}.append(self.v{n}[-1] * 0.5)\n{y} = {x} * self.v{n}[-1]",
       "--init\nself.v{n} = collections.deque(maxlen=3)\n--forward\nself.v{n}.append({x}.detach().mean())\n{y} = {x} - sum(self.v{n}) / len(self.v{n})",
       "--init\nself.v{n} = []\n--forward\nself.v{n}.append({x}.detach())\n{y} = {x} * 2",
       "--init\nself.v{n} = {'k': 1.0}\n--forward\nself.v{n}['k'] *= 0.5\n{y} = {x} * self.v{n}['k']",
       "--init\nself.v{n} = None\n--forward\nself.v{n} = {x}\n{y} = self.v{n}.sin()")

PYTHON("Python's random numbers", 2,
       "{y} = {x} * random.{random()|uniform(0.5, 1)|choice([0.5, 2.0])|gauss(0, 1)}",
       "{y} = {x} + float(np.random.{rand()|randn()})",
       "--init\nself.r{n} = random.Random(0)\n--forward\n{y} = {x} * self.r{n}.random()",
       "--init\nself.r{n} = np.random.default_rng(0)\n--forward\n{y} = {x} * self.r{n}.random()",
       "if random.random() < 0.5:\n    {body:x}\n    {y} = {b}\nelse:\n    {y} = {x} * 1")

# ------------------------------------------------------------------------------ containers that change between the calls


def changing(init: str, read: str, change: str, top: str = "") -> str:
    """`read` is a number that forward reads, and `change` what the training loop does to it before a step."""
    head = f"--top\n{top}\n" if top else ""
    return f"{head}--init\n{init}\n--before\n{change}\n--forward\n{{y}} = {{x}} * {read}"


PYTHON("a number that the loop changes", 6,
       changing("self.v{n} = argparse.Namespace(tau=1.0)", "self.v{n}.tau", "model.v{n}.tau *= 0.5"),
       changing("self.v{n} = types.SimpleNamespace(tau=1.0)", "self.v{n}.tau", "model.v{n}.tau = 1 / (step + 1)"),
       changing("self.v{n} = {'tau': 1.0}", "self.v{n}['tau']", "model.v{n}['tau'] *= 0.5"),
       changing("self.v{n} = [1.0]", "self.v{n}[-1]", "model.v{n}{.append(0.5 ** step)|[0] = 0.5 ** step}"),
       changing("self.v{n} = [1.0]", "len(self.v{n})", "model.v{n}.append(step)"),
       changing("self.v{n} = collections.deque([1.0], maxlen=2)", "sum(self.v{n})", "model.v{n}.append(step)"),
       changing("self.v{n} = collections.UserDict(tau=1.0)", "self.v{n}['tau']", "model.v{n}['tau'] *= 0.5"),
       changing("self.v{n} = collections.ChainMap({}, {'tau': 1.0})", "self.v{n}['tau']", "model.v{n}['tau'] *= 0.5"),
       changing("self.v{n} = {1, 2}", "len(self.v{n})", "model.v{n}.add(step)"),
       changing("self.v{n} = 1.0", "self.v{n}", "model.v{n} = 0.5 ** step"),
       changing("self.v{n} = array.array('d', [1.0])", "self.v{n}[0]", "model.v{n}[0] *= 0.5"),
       changing("self.v{n} = np.ones(2)", "float(self.v{n}[0])", "model.v{n}[0] *= 0.5"),
       changing("self.v{n} = np.array([1.0, None], dtype=object)", "self.v{n}[0]", "model.v{n}[0] *= 0.5"),
       changing("self.v{n} = ctypes.c_double(1.0)", "self.v{n}.value", "model.v{n}.value *= 0.5"),
       changing("self.v{n} = threading.local()\nself.v{n}.tau = 1.0", "self.v{n}.tau", "model.v{n}.tau *= 0.5"),
       changing("self.v{n} = queue.Queue()\nself.v{n}.put(1.0)", "self.v{n}.queue[0]", "model.v{n}.queue[0] *= 0.5"),
       changing("self.v{n} = Config{n}()", "self.v{n}.tau", "model.v{n}.tau *= 0.5",
                "@dataclasses.dataclass\nclass Config{n}:\n    tau: float = 1.0"),
       changing("self.v{n} = Config{n}()", "self.v{n}.tau", "model.v{n}.tau *= 0.5",
                "class Config{n}:\n    __slots__ = ('tau',)\n    def __init__(self):\n        self.tau = 1.0"),
       changing("self.v{n} = Config{n}()", "self.v{n}.tau", "model.v{n}.hidden *= 0.5",
                "class Config{n}:\n    hidden = 1.0\n    @property\n    def tau(self):\n        return self.hidden * 2"),
       changing("self.v{n} = Config{n}()", "self.v{n}.tau", "model.v{n}.hidden *= 0.5",
                "class Config{n}:\n    hidden = 1.0\n    def __getattr__(self, name):\n        return self.hidden * 2"),
       changing("self.v{n} = 0", "Mode{n}.A.tau", "Mode{n}.A.tau *= 0.5", "class Mode{n}(enum.Enum):\n    A = 1\nMode{n}.A.tau = 1.0"),
       changing("self.v{n} = 0", "Config{n}.tau", "Config{n}.tau *= 0.5", "class Config{n}:\n    tau = 1.0"),
       changing("self.v{n} = 0", "CONFIG{n}['tau']", "CONFIG{n}['tau'] *= 0.5", "CONFIG{n} = {'tau': 1.0}"),
       changing("self.v{n} = 0", "TAU{n}.get()", "TAU{n}.set(0.5 ** step)", "TAU{n} = contextvars.ContextVar('tau', default=1.0)"),
       changing("self.v{n} = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)", "self.v{n}.param_groups[0]['lr']",
                "model.v{n}.param_groups[0]['lr'] *= 0.5"),
       changing("self.v{n} = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 0.5)",
                "self.v{n}.get_last_lr()[0]", "model.v{n}.optimizer.step()\nmodel.v{n}.step()"),
       changing("self.v{n} = torch.distributions.Normal(0.0, 1.0)", "self.v{n}.scale", "model.v{n}.scale = torch.tensor(0.5 ** step)"),
       changing("self.v{n} = functools.partial(float, 1.0)", "self.v{n}()", "model.v{n} = functools.partial(float, 0.5 ** step)"),
       changing("self.v{n} = lambda tau=[1.0]: tau[0]", "self.v{n}()", "model.v{n}.__defaults__[0][0] *= 0.5"),
       changing("self.v{n} = weakref.WeakValueDictionary()\nself.k{n} = Config{n}()\nself.v{n}['k'] = self.k{n}",
                "self.v{n}['k'].tau", "model.k{n}.tau *= 0.5", "class Config{n}:\n    tau = 1.0"),
       changing("self.v{n}, self.k{n} = holder{n}()", "self.v{n}()", "model.k{n}(0.5 ** step)",
                "def holder{n}():\n    tau = 1.0\n    def get():\n        return tau\n    def put(value):\n        nonlocal tau\n"
                "        tau = value\n    return get, put"),
       changing("self.v{n} = collections.{Counter|OrderedDict}(tau=2)", "self.v{n}['tau']", "model.v{n}['tau'] += 1"),
       changing("self.k{n} = {'tau': 1.0}\nself.v{n} = types.MappingProxyType(self.k{n})", "self.v{n}['tau']", "model.k{n}['tau'] *= 0.5"),
       changing("self.v{n} = bytearray(b'a')", "self.v{n}[0] / 100", "model.v{n}[0] += 1"),
       changing("self.v{n} = Config{n}(1.0)", "self.v{n}.tau", "model.v{n} = Config{n}(0.5 ** step)",
                "Config{n} = collections.namedtuple('Config{n}', 'tau')"),
       changing("self.v{n} = Config{n}()", "self.v{n}.inner.tau", "model.v{n}.inner.tau *= 0.5",
                "class Config{n}:\n    def __init__(self):\n        self.inner = types.SimpleNamespace(tau=1.0)"),
       changing("self.v{n} = 0", "float(os.environ.get('TAU{n}', '1.0'))", "os.environ['TAU{n}'] = str(0.5 ** step)"),
       changing("self.v{n} = nn.LeakyReLU(0.1)", "self.v{n}.negative_slope", "model.v{n}.negative_slope *= 0.5"),
       changing("self.v{n} = 0", "getattr(self, 'k' + '{n}', 1.0)", "model.k{n} = 0.5 ** step"),
       changing("self.v{n} = [[1.0]]", "sum(sum(row) for row in self.v{n})", "model.v{n}[0].append(step)"))

PYTHON("a choice that the loop changes", 3,
       "--init\nself.f{n} = torch.sin\n--before\nmodel.f{n} = (torch.sin, torch.cos, torch.tanh)[step % 3]\n--forward\n{y} = self.f{n}({x})",
       "--init\nself.k{n} = 'a'\n--before\nmodel.k{n} = 'ab'[step % 2]\n--forward\n{y} = {x}.sin() if self.k{n} == 'a' else {x}.cos()",
       "--init\nself.v{n} = [torch.sin]\n--before\nmodel.v{n}.append(torch.tanh)\n--forward\n{y} = {x}\nfor f in self.v{n}:\n    {y} = f({y})",
       "--init\nself.v{n} = torch.ones({w}, dtype=torch.float64)\n--before\nmodel.v{n}{ = model.v{n} * 0.5|.mul_(0.5)|[0] = step}\n--forward\n{y} = {x} * self.v{n}",
       "--init\nself.l{n} = nn.Dropout(0.0)\n--before\nmodel.l{n}.p = 0.0\n--forward\n{y} = self.l{n}({x})",
       "--init\nself.l{n} = nn.LeakyReLU(0.1)\n--before\nmodel.l{n}.negative_slope *= 2\n--forward\n{y} = self.l{n}({x})",
       "--init\nself.l{n} = nn.LayerNorm({w})\n--before\nmodel.l{n}.eps = 0.1 * step + 1e-5\n--forward\n{y} = self.l{n}({x})",
       "--init\nself.l{n} = nn.Tanh()\n--before\nmodel.l{n} = (nn.Sigmoid(), nn.Tanh())[step % 2]\n--forward\n{y} = self.l{n}({x})",
       "--init\nself.l{n} = nn.Sequential(nn.Tanh())\n--before\nmodel.l{n}.append(nn.Sigmoid())\n--forward\n{y} = self.l{n}({x})")

PYTHON("a tensor that the loop changes", 2, """
--init
self.t{n} = torch.ones({w}).double()
--before
model.t{n}{.data = torch.full(({w},), 0.5 + step).double()|.data.mul_(0.9)|.numpy()[0] = step| = model.t{n} * 0.5|.add_(1)}
--forward
{y} = {x} * self.t{n}
""", """
--init
self.t{n} = torch.tensor(1.0).double()
--before
model.t{n}{.data = torch.tensor(0.5 + step).double()|.data.fill_(step)|.numpy().fill(step)|.fill_(step)}
--forward
{y} = {x} {* self.t{n}.item()|if self.t{n} > 0.5 else 2 * {x}}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--before
if step {== 1|}:
    model.l{n}.{weight|bias}.scale = 2.0 + step
--forward
{y} = self.l{n}({x}) * getattr(self.l{n}.{weight|bias}, "scale", 1.0)
""")

PYTHON("a hook that the loop sets", 2, """
--init
self.l{n} = {m}
--before
if step == 1:
    model.l{n}.register_{forward_hook(lambda module, args, output: output * 2)|forward_pre_hook(lambda module, args: (args[0] * 2,))|full_backward_hook(lambda module, inner, outer: tuple(g * 2 for g in inner))}
--forward
{y} = self.l{n}({x}) + {x}
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--before
if step == {0|1}:
    model.l{n}.weight.{register_hook(lambda g: g * 0.5)|register_hook(lambda g: g.clamp(-0.01, 0.01))|register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])}
--forward
{y} = self.l{n}({x}) + {x}
""")

PYTHON("a buffer that the loop writes", 2, """
--init
self.register_buffer("b{n}", torch.ones({w}))
--before
with torch.no_grad():
    model.b{n}{.mul_(0.5)|[0] = step|.copy_(torch.full(({w},), 0.5 ** step))}
--forward
{y} = {x} * self.b{n}
""")

# ------------------------------------------------------------------------------------------ what papers put together

PYTHON("a deep equilibrium", 2, """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
with torch.no_grad():
    u{n} = torch.zeros_like({x})
    for _ in range(5):
        u{n} = (0.3 * self.l{n}(u{n}) + {x}).tanh()
u{n} = (0.3 * self.l{n}(u{n}) + {x}).tanh()
v{n} = u{n}.detach().requires_grad_()
w{n} = (0.3 * self.l{n}(v{n}) + {x}.detach()).tanh()
def f{n}(g):
    out = g
    for _ in range(3):
        out = torch.autograd.grad(w{n}, v{n}, out, retain_graph=True)[0] + g
    return out
if u{n}.requires_grad:
    u{n}.register_hook(f{n})
{y} = u{n}
""")

PYTHON("a codebook", 3, """
--init
self.register_buffer("b{n}", torch.randn(5, {w}))
--forward
u{n} = torch.cdist({x}.flatten(0, -2), self.b{n}).argmin(-1)
v{n} = self.b{n}[u{n}].reshape({s})
with torch.no_grad():
    counts = F.one_hot(u{n}, 5).to({x}.dtype)
    self.b{n}{.mul_(0.9).add_(counts.t() @ {x}.flatten(0, -2), alpha=0.1)| = self.b{n} * 0.9 + 0.1 * counts.t() @ {x}.flatten(0, -2)}
{y} = {x} + (v{n} - {x}).detach() + F.mse_loss({x}, v{n}.detach())
""", """
--init
self.l{n} = nn.Embedding(5, {w})
--forward
u{n} = torch.cdist({x}.detach().flatten(0, -2), self.l{n}.weight.detach()).argmin(-1)
v{n} = self.l{n}(u{n}).reshape({s})
{y} = {x} + (v{n} - {x}).detach() + 0.25 * F.mse_loss(v{n}.detach(), {x}) + F.mse_loss(v{n}, {x}.detach())
""")

PYTHON("a teacher and a student", 3, """
--init
self.l{n} = {m}
self.t{n} = copy.deepcopy(self.l{n})
--forward
with torch.no_grad():
    for p, q in zip(self.t{n}.parameters(), self.l{n}.parameters()):
        p.data = p.data * 0.9 + q.data * 0.1
    u{n} = (self.t{n}({x}) / 0.1).softmax(-1)
{y} = {x} - (u{n} * self.l{n}({x}).log_softmax(-1)).sum(-1, keepdim=True)
""", """
--init
self.l{n} = {m}
--forward
u{n} = self.l{n}({x}){.detach()|}
v{n} = u{n}.detach().exp()
for _ in range(3):
    v{n} = v{n} / v{n}.sum(0, keepdim=True)
    v{n} = v{n} / v{n}.sum(-1, keepdim=True)
{y} = {x} + v{n} * self.l{n}({x}.sin())
""")

PYTHON("experts", 3, """
--init
self.r{n} = nn.Linear({w}, 3)
self.l{n} = nn.ModuleList(nn.Linear({w}, {w}) for _ in range(3))
--forward
u{n}, v{n} = self.r{n}({x}).softmax(-1).topk({1|2}, -1)
{y} = {x}
for k in range(3):
    {y} = {y} + (u{n} * (v{n} == k)).sum(-1, keepdim=True) * self.l{n}[k]({x})
""", """
--init
self.r{n} = nn.Linear({w}, 3)
self.w{n} = nn.Parameter(torch.randn(3, {w}, {w}) / 3)
--forward
u{n} = self.r{n}({x}).softmax(-1)
v{n} = u{n}.argmax(-1)
{y} = {x} + torch.einsum("...i,...ij->...j", {x}, self.w{n}[v{n}]) * u{n}.gather(-1, v{n}[..., None])
""", """
--init
self.r{n} = nn.Linear({w}, 3)
self.l{n} = nn.ModuleList(nn.Linear({w}, {w}) for _ in range(3))
--forward
u{n} = {x}.reshape(-1, {w})
v{n} = self.r{n}(u{n}).argmax(-1)
w{n} = torch.zeros_like(u{n})
for k, expert in enumerate(self.l{n}):
    at = torch.where(v{n} == k)[0]
    w{n}.index_add_(0, at, expert(u{n}[at]))
{y} = {x} + w{n}.reshape({s})
""")

PYTHON("truncated backpropagation", 2, """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
u{n} = {x}.new_zeros({w})
v{n} = []
for k, row in enumerate({x}.flatten(0, -2)[:4]):
    u{n} = (self.l{n}(row) + u{n}).tanh()
    v{n}.append(u{n})
    if k % 2:
        u{n} = u{n}.detach()
{y} = {x} + torch.stack(v{n}).mean(0)
""")

PYTHON("a property that computes", 2, """
--top
class Bound{n}(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(torch.randn({w}, {w}) / 3)

    @property
    def weight(self):
        return self.raw.tanh(){| * 2|.detach() + self.raw}

    def forward(self, a):
        return F.linear(a, self.weight)
--init
self.l{n} = Bound{n}()
--forward
{y} = self.l{n}({x})
""", """
--top
class Scaled{n}(nn.Linear):
    def forward(self, a):
        return super().forward(a) * {0.5|self.training}

    def __call__(self, a):
        return super().__call__(a) + 1
--init
self.l{n} = Scaled{n}({w}, {w})
--forward
{y} = self.l{n}({x})
""", """
--init
self.l{n} = nn.Linear({w}, {w})
self.l{n}.forward = {lambda a, layer=self.l{n}: F.linear(a, layer.weight * 2)|types.MethodType(lambda self, a: a @ self.weight.t(), self.l{n})|functools.partial(F.linear, weight=self.l{n}.weight)}
--forward
{y} = self.l{n}({x})
""")

# ------------------------------------------------------------------------------------------ around forward: the loop

PYTHON("several forward passes a step", 2, """
--loss
loss = model(**batch(step)) + {model(**batch(step + 3))|model(**batch(step)).detach()}
--forward
{y} = {x}
""", """
--loss
loss = model(**batch(step)) {* 0.5|/ 3|+ 0.001 * sum(p.square().sum() for p in model.parameters())}
--forward
{y} = {x}
""", """
--loss
(model(**batch(step)) / 2).backward()
loss = model(**batch(step + 3)) / 2
--forward
{y} = {x}
""", """
--loss
loss = model(**batch(step))
loss.backward(retain_graph=True)
--forward
{y} = {x}
""", """
--loss
with torch.no_grad():
    before = model(**batch(step))
loss = model(**batch(step)) * before
--forward
{y} = {x}
""")

PYTHON("a step towards the sharpest weights", 1, """
--backward
with torch.no_grad():
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        if p.grad is not None:
            p.add_(p.grad, alpha=0.01)
optimizer.zero_grad()
model(**batch(step)).backward()
with torch.no_grad():
    for p, before in zip(model.parameters(), kept):
        p.copy_(before)
--forward
{y} = {x}
""")

PYTHON("a learning rate that changes", 1, """
--before
for group in optimizer.param_groups:
    group["lr"] *= 0.5
--forward
{y} = {x}
""")

PYTHON("evaluation between steps", 2, """
--before
model.eval()
with torch.no_grad():
    model(**batch(step + 7))
model.train()
--forward
{y} = {x}{| if self.training else {x} * 2}
""")

PYTHON("frozen between steps", 2, """
--init
self.l{n} = {m}
--before
model.l{n}.requires_grad_({step % 2 == 0|step < 1|step > 0})
--forward
{y} = self.l{n}({x}) + {x}
""")

PYTHON("gradients are changed before the step", 3, """
--backward
{torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)|torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)}
--forward
{y} = {x}
""", """
--backward
for p in model.parameters():
    if p.grad is not None:
        p.grad.{mul_(0.5)|clamp_(-0.01, 0.01)|add_(p.detach(), alpha=0.1)}
--forward
{y} = {x}
""", """
--backward
trained = [p for p in model.parameters() if p.requires_grad]
for p, g in zip(trained, torch.autograd.grad(model(**batch(step)), trained, allow_unused=True)):
    p.grad = g
--forward
{y} = {x}
""")

PYTHON("weights are changed after the step", 2, """
--after
with torch.no_grad():
    for p in model.parameters():
        p.{clamp_(-0.3, 0.3)|mul_(0.99)}
--forward
{y} = {x}
""", """
--after
for p in model.parameters():
    p.data.{clamp_(-0.3, 0.3)|mul_(0.99)}
--forward
{y} = {x}
""")

PYTHON("several backward passes a step", 2, """
--backward
model(**batch(step + 3)).backward()
--forward
{y} = {x}
""")

# --------------------------------------------------------------------------------------------------------- checkpoints

PYTHON("a checkpoint", 5, """
def f{n}(a):
    {body:a}
    return {b}
{y} = torch.utils.checkpoint.checkpoint(f{n}, {x}, use_reentrant={True|False|False}{||, preserve_rng_state=False})
""", """
--init
self.l{n} = {m}
--forward
{y} = torch.utils.checkpoint.checkpoint(self.l{n}, {x}, use_reentrant={True|False})
""", """
def f{n}(a, k):
    {body:a}
    return {b} * k, a.sin()
{y}, u{n} = torch.utils.checkpoint.checkpoint(f{n}, {x}, 2.0, use_reentrant={True|False})
{y} = {y} + u{n}
""")

PYTHON("a checkpoint that keeps some", 1, """
--top
def kept{n}(ctx, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if saved else policy.PREFER_RECOMPUTE
--forward
def f{n}(a):
    {body:a}
    return {b}
u{n} = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, kept{n})
{y} = torch.utils.checkpoint.checkpoint(f{n}, {x}, use_reentrant=False, context_fn=u{n})
""")

PYTHON("checkpoints in a checkpoint", 3, """
def f{n}(a):
    def inner(a):
        {body:a}
        return {b}
    return torch.utils.checkpoint.checkpoint(inner, a.sin(), use_reentrant={True|False}).tanh()
{y} = torch.utils.checkpoint.checkpoint(f{n}, {x}, use_reentrant={True|False})
""", """
--init
self.l{n} = nn.Sequential({m}, nn.Tanh(), {m}, nn.Sigmoid())
--forward
{y} = torch.utils.checkpoint.checkpoint_sequential(self.l{n}, 2, {x}, use_reentrant={True|False})
""")

# ---------------------------------------------------------------------------------------- weights that are made or shared

PYTHON("a parametrization", 6,
       *("--init\nself.l{n} = " + text + "\n--forward\n{y} = self.l{n}({x}){| + {x}}" for text in (
           "nn.utils.parametrizations.weight_norm(nn.Linear({w}, {w}){|, dim=None|, dim=1})",
           "nn.utils.parametrizations.spectral_norm(nn.Linear({w}, {w}){|, n_power_iterations=2})",
           "nn.utils.parametrizations.orthogonal(nn.Linear({w}, {w}){|, orthogonal_map='{cayley|matrix_exp|householder}'})",
           "nn.utils.weight_norm(nn.Linear({w}, {w}))", "nn.utils.spectral_norm(nn.Linear({w}, {w}))",
           "nn.utils.prune.{l1|random}_unstructured(nn.Linear({w}, {w}), 'weight', 0.5)")),
       """
--top
class Symmetric{n}(nn.Module):
    def forward(self, a):
        return a.triu() + a.triu(1).t()
--init
self.l{n} = nn.Linear({w}, {w})
nn.utils.parametrize.register_parametrization(self.l{n}, "weight", Symmetric{n}())
--forward
{y} = self.l{n}({x})
""", """
--init
self.l{n} = nn.utils.parametrizations.{weight_norm|spectral_norm}(nn.Linear({w}, {w}))
--forward
with nn.utils.parametrize.cached():
    {y} = self.l{n}(self.l{n}({x}).tanh())
""")

PYTHON("shared weights", 5, """
--init
self.l{n} = {m}
--forward
{y} = self.l{n}(self.l{n}({x}).tanh())
""", """
--init
self.l{n}, self.k{n} = nn.Linear({w}, {w}), nn.Linear({w}, {w})
self.k{n}.weight = self.l{n}.weight
--forward
{y} = self.k{n}(self.l{n}({x}).tanh())
""", """
--init
self.l{n} = nn.Linear({w}, {w})
self.k{n} = self.l{n}
--forward
{y} = self.k{n}({x}) + F.linear({x}, self.l{n}.weight.t())
""", """
--init
self.l{n} = nn.ModuleList([nn.Linear({w}, {w})] * 2)
--forward
{y} = {x}
for layer in self.l{n}:
    {y} = layer({y}).sin()
""")

PYTHON("weights of one's own making", 2, """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
{y} = torch.func.functional_call(self.l{n}, {k: p {* 0.5|+ 0.1 * p.sin()|.detach()} for k, p in self.l{n}.named_parameters()}, ({x},))
""", """
--init
self.l{n} = nn.ParameterDict({"a": torch.randn({w}, {w}) / 3, "b": torch.zeros({w})})
--forward
{y} = {x} @ self.l{n}["a"] + sum(self.l{n}[k].sum() for k in sorted(self.l{n}))
""", """
--init
self.l{n} = nn.Linear({w}, {w})
--forward
self.t{n} = copy.deepcopy(self.l{n})
{y} = self.l{n}({x}) + self.t{n}({x}).detach()
""", """
--init
self.l{n} = nn.Linear({w}, 2 * {w})
self.n{n} = nn.Linear(3, {w})
--forward
u{n} = self.n{n}(torch.ones(3, dtype={x}.dtype)).softmax(-1)
{y} = (self.l{n}({x}) @ torch.diag(u{n}.repeat(2)))[..., : {w}]
""")

# ------------------------------------------------------------------------------------------------------ modes, norms, casts

PYTHON("parts in evaluation", 3,
       "--init\nself.l{n} = nn.{Dropout(0.5)|BatchNorm1d({w})}\nself.l{n}.eval()\n--forward\n{y} = self.l{n}({x})",
       "--make\nmodel.eval()\n--forward\n{y} = {x}",
       "--make\nfor module in list(model.modules())[::2]:\n    module.training = False\n--forward\n{y} = {x}",
       "--init\nself.l{n} = nn.BatchNorm1d({w})\n--forward\nself.l{n}.eval()\n{y} = self.l{n}({x})\nself.l{n}.train()")

PYTHON("a batch norm that is shared or skipped", 2, """
--init
self.l{n} = nn.BatchNorm1d({w}, momentum={None|0.1})
--forward
{y} = self.l{n}({x}) + self.l{n}({x}.sin())
""", """
--init
self.l{n} = nn.BatchNorm1d({w}, momentum={None|0.1})
--forward
with torch.no_grad():
    self.l{n}({x} * 2)
{y} = self.l{n}({x})
""", """
--init
self.l{n} = nn.BatchNorm1d({w})
--forward
{y} = F.batch_norm({x}, self.l{n}.running_mean, self.l{n}.running_var, training={True|False})
""")

PYTHON("autocast", 3, """
with torch.autocast("cpu", torch.bfloat16{|, enabled=False|, cache_enabled=False}):
    {body:x}
{y} = {x} + {b}
""", """
with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
    {body:x}
{y} = {x} + {b}
""", """
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
    {body:x}
{y} = {x} + {b}
""")

PYTHON("autocast of float32", 1, """
--init
self.w{n} = nn.Parameter(torch.randn({w}, {w}) / 3)
--forward
with torch.autocast("cpu", torch.bfloat16{|, enabled=False|, cache_enabled=False}):
    u{n} = F.linear({x}.float(), self.w{n}.float()){.softmax(-1)||.tanh()}
{y} = {x} + u{n}.to({x}.dtype)
""")

# ----------------------------------------------------------------------------------------------- control flow, and data

PYTHON("a model that is scripted or traced", 0.5, """
--init
self.l{n} = torch.jit.{script(nn.Linear({w}, {w}))|trace(nn.Linear({w}, {w}), torch.randn({r}, {w}))}
--forward
{y} = self.l{n}({x}) + {x}
""")

PYTHON("contexts of autograd", 2, """
with torch.autograd.{set_detect_anomaly(True)|set_multithreading_enabled(False)|profiler.record_function("part")|graph.disable_saved_tensors_hooks("none")|graph.allow_mutation_on_saved_tensors()}:
    {body:x}
{y} = {x} + {b}
""")

PYTHON("a choice of kernels", 1, """
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    {y} = F.scaled_dot_product_attention({x}[None], {x}[None].sin(), {x}[None])[0]
""", """
with torch.backends.mkldnn.flags(enabled=False):
    {body:x}
{y} = {x} + {b}
""")

PYTHON("torch.cond", 1, """
{y} = torch.cond({x}.sum() > 0, lambda a: a.sin(), lambda a: a.cos() * 2, ({x},))
""", """
--init
self.l{n}, self.k{n} = nn.Linear({w}, {w}), nn.Linear({w}, {w})
--forward
{y} = torch.cond({x}.mean() > 0, lambda a: self.l{n}(a), lambda a: self.k{n}(a), ({x},))
""")

PYTHON("numbers of a mask", 4, """
--batch
mask{n} = torch.arange({r}) < max(1, {r} - 1)
--forward
{y} = {x} * (mask{n}.sum(){|.item()} / {r})
{y} = {y}[mask{n}]
""", """
--batch
mask{n} = torch.arange({r}) % 2 == 0
--forward
{y} = {x}{[mask{n}]|[mask{n}.nonzero().flatten()]|[torch.where(mask{n})[0]]|.masked_select(mask{n}.reshape(-1, *[1] * ({x}.dim() - 1))).reshape(-1, *{x}.shape[1:])}
""", """
--batch
mask{n} = torch.arange({r}) < max(1, {r} - 1)
--forward
u{n} = {x}.clone()
u{n}[mask{n}] = {x}[mask{n}].sin()
{y} = u{n}
""")

PYTHON("numbers of lengths", 4, """
--batch
lengths{n} = torch.full(({r},), {w}).clamp(max=torch.arange({r}) + 1)
--forward
u{n} = {int(lengths{n}.max())|lengths{n}.max().item()|max(lengths{n}.tolist())}
{y} = {x}[..., : u{n}] * u{n}
""", """
--batch
lengths{n} = torch.full(({r},), 1)
--forward
{y} = torch.cat([part.cumsum(0) * (i + 1) for i, part in enumerate({x}.split(lengths{n}.tolist()))])
""", """
--batch
lengths{n} = torch.arange({r}) % 3
--forward
{y} = {x}.repeat_interleave(lengths{n}, 0)[: {r}]
""", """
--batch
lengths{n} = torch.full(({r},), min(3, {l}))
--init
self.l{n} = nn.{GRU|LSTM|RNN}({w}, 5, batch_first=True)
--forward
u{n} = nn.utils.rnn.pack_padded_sequence({x}[:, :3], lengths{n}, batch_first=True)
{y} = nn.utils.rnn.pad_packed_sequence(self.l{n}(u{n})[0], batch_first=True)[0]
""")

PYTHON("numbers of labels", 4, """
--batch
labels{n} = torch.arange({r}) % 3
--init
self.l{n} = nn.Linear(3, {w})
--forward
{y} = {x} + self.l{n}(F.one_hot(labels{n}{|, 3}).to({x}.dtype)).reshape({r}, *[1] * ({x}.dim() - 2), {w})
""", """
--batch
labels{n} = torch.arange({r}) % 3
--init
self.l{n} = nn.ModuleList(nn.Linear({w}, {w}) for _ in range(3))
--forward
u{n} = torch.zeros_like({x})
for k in range(3):
    at = {(labels{n} == k).nonzero().flatten()|torch.where(labels{n} == k)[0]}
    u{n}{.index_add_(0, at, self.l{n}[k]({x}[at]))|[at] = self.l{n}[k]({x}[at])}
{y} = {x} + u{n}
""", """
--batch
labels{n} = torch.arange({r}) % 3
--forward
{y} = {x} * {len(labels{n}.unique())|torch.bincount(labels{n}).max()|int(labels{n}.sum())|(2 if labels{n}.max() > 1 else 1)}
""", """
--batch
labels{n} = torch.arange({r}) % 3
--forward
{y} = sum({x}[i] * (k + 1) for i, k in enumerate(labels{n}.tolist()))[None]
""")

PYTHON("numbers of values", 3,
       "if {{x}.isnan().any()|{x}.abs().max() > 1e6|not torch.isfinite({x}).all()}:\n    raise ValueError('too large')\n{y} = {x}",
       "{y} = {x} * {{x}.mean().item()|float({x}.abs().max())|{x}.detach().norm().item()}",
       "{y} = {x} if {x}.sum() > 0 else -{x}",
       "assert not {x}.isnan().any()\n{y} = {x}",
       "{y} = {x}[{x}[..., 0].flatten().detach().argmax() % {r} :][:1]",
       "{y} = {x} + len({x}.detach().sign().unique())",
       "if torch.rand(()) < 0.5:\n    {body:x}\n    {y} = {b}\nelse:\n    {y} = {x} * 1")

PYTHON("Python's control flow", 4, """
try:
    u{n} = {x} @ torch.ones({w} + 1, 2)
except RuntimeError:
    u{n} = {f:x}
{y} = {x} + u{n}
""", """
u{n} = []
for i, row in enumerate({x}.unbind({0|1|-1})):
    if i % 2:
        continue
    u{n}.append(row * (i + 1))
{y} = {x} + torch.stack(u{n}).sum()
""", """
{y} = {x}
while {y}.dim() < 3:
    {y} = {y}[None]
{y} = {y}.sin().reshape({x}.shape)
""", """
match {x}.dim():
    case 2:
        {y} = {x}.sin()
    case _:
        {y} = {x}.cos()
""", """
u{n} = {"a": {x}, "b": {z}}
{y} = sum(v * (i + 1) for i, (k, v) in enumerate(sorted(u{n}.items(), reverse=True)))
""", """
u{n} = (row.sin() for row in {x})
{y} = torch.stack(list(u{n}))
""")

PYTHON("random states", 1,
       "with torch.random.fork_rng():\n    u{n} = torch.rand_like({x})\n{y} = {x} + u{n}",
       "torch.manual_seed(3)\n{y} = {x} + torch.rand_like({x})",
       "u{n} = torch.Generator().manual_seed(3)\n{y} = {x} + torch.rand({w}, generator=u{n})",
       "u{n} = torch.get_rng_state()\nv{n} = torch.rand_like({x})\ntorch.set_rng_state(u{n})\n{y} = {x} + v{n} + torch.rand_like({x})",
       "torch.rand_like({x})\n{y} = {x}")

# -------------------------------------------------------------------------------------------------------------- structure

PYTHON("layers", 5, """
--top
class Layer{n}(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        {init}

    def forward(self, a):
        {body:a}
        return a + {b} * 0.5
--init
self.layers{n} = nn.ModuleList(Layer{n}(k) for k in range({2|3|6|7|9}))
--forward
{y} = {x}
for {layer in self.layers{n}:|i, layer in enumerate(self.layers{n}):}
    {y} = layer({y})
""", """
--top
class Layer{n}(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        {init}

    def forward(self, a):
        {body:a}
        return a + {b} * 0.5
--init
self.layers{n} = nn.Sequential(*(Layer{n}(k) for k in range({4|6|8})))
{|self.layers{n}[2].requires_grad_(False)|self.layers{n}[1].eval()}
--forward
{y} = self.layers{n}({x})
""", """
--top
class Layer{n}(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number = number
        {init}

    def forward(self, a):
        {body:a}
        return a + {b} * 0.5
--init
self.layers{n} = nn.ModuleList(Layer{n}(k) for k in range({3|5}))
--forward
{y} = {x}
u{n} = [1.0 + 0.25 * k for k in range(9)]
for i, layer in enumerate(self.layers{n}):
    {y} = layer({{y} * u{n}[i]|{y}.flip(0) if i % 2 else {y}|{y}})
""")

PYTHON("one layer that is different", 4, """
{y} = {x}
if self.number {== 1|in (1, 2)|% 2 == 0|> 1}:
    {body:x}
    {y} = {x} + {b}
""", """
{y} = {x} {* 0.5 if self.number == 2 else {x}|+ self.number}
""", where="layer")

PYTHON("a module of one's own", 3, """
--top
class Block{n}(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, a):
        {body:a}
        return {b}
--init
self.l{n} = Block{n}()
--forward
{y} = self.l{n}({x}){| + {x}|.sin() + self.l{n}({x})}
""")

PYTHON("an optimizer", 3, """
--top
def optimizer(model):
    return torch.optim.{Adam(model.parameters(), lr=0.01)|AdamW(model.parameters(), lr=0.01)|SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)|Adam(model.parameters(), lr=0.01, foreach=True)}
--make
pass
--forward
{y} = {x}
""")
