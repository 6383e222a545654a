"""Plans of other libraries: names of modules with styles, as dictionaries of Python or JSON say them.

`tp_plan` and `fsdp_plan` of transformers, the styles that `parallelize_module` takes, sharding configurations of
torchtitan, layer specs of DeepSpeed's AutoTP, and Megatron's "column" and "row" are one table of words (`WORDS`).
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from autopar.extensions import nearest
from autopar.files import reading, text_of
from autopar.passes.space.choices import KEEP, REGATHER
from autopar.passes.space.space import Space

from .presets import DATA_AXIS_NAMES, Preset, tensor_axis
from .presets.styled import Styles, in_units, styled
from .provenance import DIMS, ModelFacts
from .request import NAMES, shown
from .texts import around, module_of

logger = logging.getLogger("autopar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """What a word says of a module. `split`: on the tensor axis its weights are split by "column" (outputs), by "row"
    (inputs), by "experts", or not; its result is `gathered`, or it works on rows split `by_sequence`. With `reshards`
    its parameters are sharded together on data axes, and gathered again in backward or not."""

    split: str = ""
    gathered: bool = False
    by_sequence: bool = False
    reshards: bool | None = None


COLUMN, ROW, PLAIN = Style(split="column"), Style(split="row"), Style()
GATHERED, SEQUENCE, EXPERTS = replace(COLUMN, gathered=True), Style(by_sequence=True), Style(split="experts")

WORDS: Mapping[str, Style] = {
    # torch.distributed.tensor.parallel, and torchtitan
    "ColwiseParallel": COLUMN, "RowwiseParallel": ROW, "SequenceParallel": SEQUENCE, "NoParallel": PLAIN,
    "PrepareModuleInput": PLAIN, "PrepareModuleOutput": PLAIN, "PrepareModuleInputOutput": PLAIN,
    "colwise_config": COLUMN, "rowwise_config": ROW, "norm_config": SEQUENCE, "pre_lm_head_norm_config": SEQUENCE,
    # transformers
    "colwise": COLUMN, "packed_colwise": COLUMN, "rowwise": ROW, "packed_rowwise": ROW, "rowwise_split_input": ROW,
    "rowwise_rep": ROW, "colwise_gather_output": GATHERED, "colwise_rep": GATHERED, "embedding_rowwise": ROW,
    "embedding_colwise": GATHERED, "sequence_parallel": SEQUENCE, "grouped_gemm": EXPERTS, "replicate": PLAIN,
    "replicated_with_grad_allreduce": PLAIN, "moe_tp_experts": PLAIN, "ep_dispatch_experts": PLAIN,
    "local_params": PLAIN, "all_reduce": PLAIN,
    "free_full_weight": Style(reshards=True), "keep_full_weight": Style(reshards=False),
    # Megatron and DeepSpeed
    "column": COLUMN, "row": ROW, "skip": PLAIN, "ColumnParallelLinear": COLUMN, "RowParallelLinear": ROW,
    "VocabParallelEmbedding": ROW,
}  # fmt: skip

ALIASES: Mapping[str, tuple[str, ...]] = {
    "tok_embeddings": ("embed_tokens",), "embedding.word_embeddings": ("embed_tokens",), "output": ("lm_head",),
    "output_layer": ("lm_head",), "attention_norm": ("input_layernorm",), "ffn_norm": ("post_attention_layernorm",),
    "pre_mlp_layernorm": ("post_attention_layernorm",), "decoder.final_layernorm": ("model.norm",),
    "attention": ("self_attn",), "feed_forward": ("mlp",),
    "attention.wq": ("self_attn.q_proj",), "attention.wk": ("self_attn.k_proj",),
    "attention.wv": ("self_attn.v_proj",), "attention.wo": ("self_attn.o_proj",),
    "feed_forward.w1": ("mlp.gate_proj",), "feed_forward.w2": ("mlp.down_proj",), "feed_forward.w3": ("mlp.up_proj",),
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",), "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}  # fmt: skip
"""What modules of torchtitan and Megatron are called in transformers, by the ends of their names."""


def entries(text: str) -> dict[str, Style]:
    """Names, with `*`, or regular expressions after "re:", and their styles: of all dictionaries in a text of JSON or
    Python that have them. Raises ValueError for what is neither, and where there is no style."""
    with contextlib.suppress(ValueError):  # of what is Python
        text = repr(json.loads(text))
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"it is neither JSON nor Python ({error.msg} in line {error.lineno})") from error
    found: dict[str, Style] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            found |= dict(_in(node))
    if not found:
        raise ValueError(f"no style stands in it: give names with words such as {', '.join([*WORDS][:3])} or colwise")
    return found


def _in(node: ast.Dict) -> Iterator[tuple[str, Style]]:
    """The styles in one dictionary, or the one that DeepSpeed's says of its patterns."""
    pairs = [(str(k.value), v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
    spec = {key: ast.literal_eval(v) for key, v in pairs if key in ("patterns", "partition_type", "gather_output")}
    if "patterns" in spec:
        if (word := spec.get("partition_type", "column")) not in WORDS:
            raise ValueError(f"partition_type is {word!r}: give column, row or skip")
        style = replace(WORDS[word], gathered=bool(spec.get("gather_output")))
        yield from ((f"re:{pattern}", style) for pattern in spec["patterns"])
        return
    for key, text in ((key, ast.unparse(value)) for key, value in pairs):
        word = text.partition("(")[0].rpartition(".")[2].strip("'")
        if word in WORDS and text[-1] in "')":  # a word or a call, and no variable
            is_whole = WORDS[word] == COLUMN and re.search(r"output_layouts=[^=]*Replicate", text)
            yield key, GATHERED if is_whole else WORDS[word]
        elif unit := re.match(r"\{[^{}]*'reshard_after_forward': (\w+)", text):
            yield key, Style(reshards=bool(ast.literal_eval(unit[1])))


SPLITS = {"column": ("column", "features", "output channels"), "row": ("row", "vocabulary", "input channels")}
"""What each split is called of a parameter of a kind (`provenance.DIMS`)."""


def dims_of(style: Style, kind: str, shape: tuple[int, ...]) -> int | None:
    """The dim of a parameter of a kind that a style splits."""
    if not style.split or not shape or (style.split == "row" and len(shape) == 1):
        return None
    names = SPLITS.get(style.split, (style.split,))
    found = [dim for dim, name in enumerate(DIMS.get(kind, ())) if name in names]
    return found[0] if found else max(0, len(shape) - (1 if style.split == "row" else 2))


Within = str | Path | Mapping[str, str] | Mapping[str, Style]
"""A library of `TARGETS`, the file of a plan of one, or such a plan."""

TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(NAMES["library"], ("linear", "embedding")),
    "fsdp2": (),
}
"""The libraries that plans are exported to, and the kinds of parameters that each splits on a tensor axis."""


def presets_within(within: Within, space: Space, facts: ModelFacts, without: Collection[str] = ()) -> list[Preset]:
    """The restrictions of the space to what a library of `TARGETS` can express, or to what a plan of one says: a file,
    or a dictionary of names and words. A library may leave the tensor axis to data, too. On several data axes
    parameters are sharded on the innermost (HSDP). Modules `without` styles have none.

    Raises ValueError for a file that holds no plan, and for one that names nothing in the model.
    """
    shapes = {name: space.graph.metas[value].shape for name, value in space.graph.parameters.items()}
    is_free, called = within in NAMES["library"], str(within) if isinstance(within, (str, Path)) else "the plan"
    said: Mapping[str, tuple[Style, ...]]
    if is_free:
        kept, reshards = {*facts.shared, *without}, {False, True}
        may = [name for name in shapes if facts.kinds[name] in TARGETS[called]]
        said = {name: (COLUMN, ROW, PLAIN) for name in may if kept.isdisjoint((name, module_of(name)))}
    else:
        said, reshards = _said(within, shapes)
    styles = Styles(
        dims={n: tuple(dims_of(style, facts.kinds[n], shapes[n]) for style in each) for n, each in said.items()},
        gathered=None if is_free else frozenset(name for name, (style, *_) in said.items() if style.gathered),
        by_sequence=any(style.by_sequence for each in said.values() for style in each),
        policies=tuple(REGATHER if again else KEEP for again in sorted(reshards)) or (KEEP,),
    )
    wide = [name for name, ranks in zip(space.axes, space.mesh, strict=True) if ranks > 1]
    tensor = space.axes[tensor_axis(space)]
    splits = any(dim is not None for dims in styles.dims.values() for dim in dims)
    if splits and tensor in DATA_AXIS_NAMES and not is_free:
        raise ValueError(
            f"{called} splits modules on a tensor axis, and the mesh has {', '.join(wide)}, for data: call an axis tp"
        )
    found, size = [], dict(zip(space.axes, space.mesh, strict=True))
    for has_tensor in [True] * (splits and tensor not in DATA_AXIS_NAMES) + [False] * (is_free or not splits):
        data = [name for name in wide if not (has_tensor and name == tensor)]
        if is_free and facts.batch % (parts := math.prod(size[name] for name in data)):
            continue
        one = replace(styles, sharded=frozenset(data[-1:] if reshards else ()))
        rule = partial(styled, styles=one) if has_tensor else None
        found.append(Preset(name=called, data=partial(in_units, styles=one), tensor=rule, policies=one.policies))
    if not found:
        raise ValueError(
            f"{called} splits a batch over all data ranks: give rows that {parts} ranks divide, not {facts.batch}"
        )
    return found


def _said(within: Within, names: Collection[str]) -> tuple[dict[str, tuple[Style, ...]], set[bool]]:
    """The style that a plan gives each parameter, and whether its units gather again."""
    if isinstance(within, Mapping):
        # names of our own are whole, and not ends of others
        if exact := {name: style for name, style in within.items() if isinstance(style, Style)}:
            units = {style.reshards for style in exact.values() if style.reshards is not None}
            return {name: (exact.get(module_of(name), PLAIN),) for name in names}, units
        found = entries(repr(dict(within)))
    else:
        with reading(f"{within} is no plan", f"give a file of names and styles, or {', '.join(TARGETS)}"):
            found = entries(text_of(within))
    used = {pattern: renamed(pattern, names) for pattern in found}
    if nothing := [pattern for pattern, patterns in used.items() if not patterns]:
        logger.warning("%s: nothing in the model is called %s", shown(within), ", ".join(nothing))
    if len(nothing) == len(found):
        raise ValueError(
            f"{shown(within)} names nothing in the model{nearest(nothing[0], [module_of(name) for name in names])}"
        )
    said: dict[str, tuple[Style, ...]] = {}
    reshards: set[bool] = set()
    for name in names:
        styles = [
            (depth, found[p])
            for depth, each in enumerate(around(name))
            for p in found
            if any(_is(each, q) for q in used[p])
        ]
        said[name] = (next((style for depth, style in styles if depth < 2 and style.reshards is None), PLAIN),)
        reshards |= {*[style.reshards for _, style in styles if style.reshards is not None][:1]}
    return said, reshards


def renamed(pattern: str, names: Iterable[str]) -> list[str]:
    """The pattern, or what a module of another library that it names is called here; none if nothing is."""
    ends = [end for end in ALIASES if _is(pattern, end)]
    others = [pattern.removesuffix(end) + new for end in sorted(ends, key=len, reverse=True) for new in ALIASES[end]]
    for tried in ([pattern], others):
        if hits := [p for p in tried if any(_is(each, p) for name in names for each in around(name))]:
            return hits
    return []


def _is(name: str, pattern: str) -> bool:
    """Whether the last parts of a name are those of a pattern, or all of it matches a regular expression."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    end = ".".join(name.split(".")[-1 - pattern.count(".") :])
    return end.count(".") == pattern.count(".") and fnmatchcase(end, pattern)
