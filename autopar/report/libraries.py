"""Plans as scripts of other libraries: what each calls a style, and a template that needs nothing of autopar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.extensions import unknown
from autopar.ir.precision import AS_IS
from autopar.planning.expressed import Expressed, stars
from autopar.planning.foreign import COLUMN, GATHERED, ROW
from autopar.planning.plan import Plan
from autopar.planning.request import AUTO, NAMES
from autopar.planning.texts import mesh_words, module_of, short_bytes, short_seconds, starred

FSDP2: Mapping[Any, str] = {
    True: "{'reshard_after_forward': True}",
    False: "{'reshard_after_forward': False}",
}

WORDS_OF: Mapping[str, Mapping[Any, str]] = {
    "fsdp2": FSDP2,
    "parallelize_module": {
        **FSDP2,
        COLUMN: "ColwiseParallel()",
        GATHERED: "ColwiseParallel(output_layouts=Replicate())",
        ROW: "RowwiseParallel()",
        ("embedding", ROW): "RowwiseParallel(input_layouts=Replicate())",
        "along": "SequenceParallel(sequence_dim={dim}, use_local_output=True)",
    },
    "transformers": {
        COLUMN: '"colwise"',
        GATHERED: '"colwise_gather_output"',
        ROW: '"rowwise"',
        ("embedding", ROW): '"embedding_rowwise"',
        ("embedding", GATHERED): '"embedding_colwise"',
        "along": '"replicated_with_grad_allreduce"',
        True: '"free_full_weight"',
        False: '"keep_full_weight"',
        "replicate": "dp_replicate_size",
        "shard": "fsdp_size",
        "tensor": "tp_size",
    },
    "torchtitan": {
        **FSDP2,
        COLUMN: "colwise_config()",
        GATHERED: "colwise_config()",
        ROW: "rowwise_config()",
        "along": "norm_config(enable_sp=False)",
        "replicate": "data_parallel_replicate_degree",
        "shard": "data_parallel_shard_degree",
        "tensor": "tensor_parallel_degree",
    },
}
"""What a library calls a style, of embeddings where that is something else, and of a module that is handed shards;
units that gather again in backward or not; and the ranks on each kind of axis, if not so."""

TORCH = '''"""{title}"""

from fnmatch import fnmatchcase

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

MESH = {sizes}

STYLES = {styles}

UNITS = {units}


def make_mesh(device_type="cuda"):
    """The mesh of all ranks. It makes the process group, where there is none."""
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def parallelize(model, mesh):
    """Splits a model in place. All ranks have the same weights before."""
    if STYLES:
        parallelize_module(model, mesh["tensor"], STYLES)
    data = mesh["replicate", "shard"] if MESH["replicate"] > 1 or MESH["shard"] == 1 else mesh["shard"]
    for pattern, options in UNITS.items():
        for name, module in model.named_modules():
            if name.count(".") == pattern.count(".") and fnmatchcase(name, pattern):
                fully_shard(module, mesh=data, **options)
    return model


def rows(batch, mesh):
    """This rank's rows of a global batch: a tensor [batch, ...]. Gradients are means over ranks, so that a loss that is
    a mean over rows, or over equally many tokens of each rank, trains as on one device."""
    part = mesh.get_local_rank("replicate") * MESH["shard"] + mesh.get_local_rank("shard")
    return batch.chunk(MESH["replicate"] * MESH["shard"])[part]
'''

TRANSFORMERS = '''"""{title}"""

from transformers.distributed import DistributedConfig

SIZES = {sizes}

TP_PLAN = {styles}

FSDP_PLAN = {units}


def parallelize(model):
    """The model on all ranks, whose process group it makes. All have the same weights before."""
    tp_plan = dict.fromkeys(model.tp_plan or (), "replicate") | TP_PLAN
    asked = DistributedConfig(**SIZES, tp_plan=tp_plan, fsdp_plan=FSDP_PLAN)
    config, _, mesh = type(model).prepare_distribute_model(asked)
    return type(model).maybe_distribute_model(model, config, mesh)
'''

TORCHTITAN = '''"""{title}"""

from torchtitan.models.common.decoder_sharding import colwise_config, norm_config, rowwise_config

PARALLELISM = {sizes}

SHARDING = {styles}

RESHARD_AFTER_FORWARD = {units}


def set_sharding(config):
    """Sets the sharding of each module in the tree of a model's Config."""
    for path, sharding in SHARDING.items():
        found = [config]
        for name in path.split("."):
            found = [part for one in found for part in (one if name == "*" else [getattr(one, name)])]
        for one in found:
            one.sharding_config = sharding
'''


TEMPLATES = {"fsdp2": TORCH, "parallelize_module": TORCH, "transformers": TRANSFORMERS, "torchtitan": TORCHTITAN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A plan as a script of a library, and what of the plan that library cannot express: then the script is of the
    `plan` that is the shortest of those that it can."""

    library: str
    script: str
    missing: tuple[str, ...]
    plan: Plan

    def __str__(self) -> str:
        return self.script


def export_plan(plan: Plan, to: str) -> Export:
    """A plan with its model (`autopar.read_plan` reads a file so) as a script of a library.

    Raises ValueError for an unknown library, and for a plan without its model.
    """
    if to not in NAMES["library"]:
        raise ValueError(unknown("library", to, NAMES["library"]))
    planner, used, words = plan.planner, plan, WORDS_OF[to]
    model = planner.example[0]
    if to == "transformers" and not hasattr(model, "maybe_distribute_model"):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers: export it to parallelize_module or fsdp2"
        )

    said: Expressed = planner.expressed(plan, to)
    names = planner.facts.shared if to == "transformers" else ()
    shared = dict.fromkeys(name for name in names if name.endswith("embed_tokens.weight"))
    refused = dict.fromkeys(starred(name) for name in sorted(said.refused(*planner.example)))
    missing = (*said.missing, *(f"{module}: its Python does not run on shards" for module in refused))
    missing += tuple(f"{name}: its FSDP fails where another module has that weight, too" for name in shared)
    if plan.training.precision != AS_IS:
        missing += ("the model: its precision, which the library's own options say",)
    if missing:
        used = planner.plan(within=to, solver=AUTO)
        said = planner.expressed(used, to)
    values = {
        "title": _title(plan, used, to, missing),
        "styles": _styles(said, words, {module_of(name): kind for name, kind in planner.facts.kinds.items()}),
        "units": _code({name: words[again] for name, again in said.units.items() if name or to != "transformers"}),
        "sizes": _code({words.get(role, role): ranks for role, ranks in said.sizes.items()}),
    }
    return Export(library=to, script=TEMPLATES[to].format(**values), missing=missing, plan=used)


def _styles(said: Expressed, words: Mapping[Any, str], kinds: Mapping[str, str]) -> str:
    told = {module: words.get((kinds[module], style), words[style]) for module, style in said.styles.items()}
    return _code(stars({**told, **{name: words["along"].format(dim=dim) for name, dim in said.along.items()}}))


def _code(values: Mapping[str, object]) -> str:
    """A dictionary as Python writes it, of values as they are written."""
    lines = [f"    {json.dumps(name)}: {value},\n" for name, value in values.items()]
    return f"{{\n{''.join(lines)}}}" if lines else "{}"


def _title(plan: Plan, used: Plan, to: str, missing: tuple[str, ...]) -> str:
    said = f"Predicted on {plan.cluster}: {short_seconds(used.seconds)} a step, {short_bytes(used.bytes)} a rank."
    lines = [f"{plan.model} on {mesh_words(plan.mesh)}, planned by autopar for {to}.", "", said]
    if missing:
        lines += ["", f"The plan before takes {short_seconds(plan.seconds)}. Of it, {to} cannot express:"]
    return "\n".join([*lines, *(f"- {one}" for one in missing), ""])
