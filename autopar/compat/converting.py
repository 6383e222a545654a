"""How transformers turns the names and tensors of published weights into those of its models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(kw_only=True)
class Conversion:
    """Tensors of files that together make tensors of a model: experts that are stacked, projections that are joined."""

    target: str
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Pattern and name in files of each."""

    def made(self, root: nn.Module, tensor_of: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Name in the model -> whole tensor, of whole tensors of files."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, tensor_of(name))
        made = converter.convert(self.target, model=root, config=root.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def stored_names(
    root: nn.Module, stored: Collection[str], names: Collection[str]
) -> tuple[Mapping[str, str], list[Conversion]]:
    """Of the `names` of a model, those that files hold as they are: name -> name in files; and what makes others. A
    model of transformers has patterns for the names that published files have; others have their own names."""
    direct = {name: name for name in stored if name in names}
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:
        return direct, []
    if not isinstance(root, PreTrainedModel):
        return direct, []
    transforms = get_model_conversion_mapping(root)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    there = dict.fromkeys(names, True)
    direct = {}
    conversions: dict[str, Conversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, root.base_model_prefix, there)
        if target not in there and name in there:
            target, pattern = rename_source_key(name, [], [], root.base_model_prefix, there)
        if target not in there:
            continue
        if pattern is None:
            direct[target] = name
        else:
            made = conversions.setdefault(target, Conversion(target=target, converter=by_pattern[pattern]))
            made.sources.append((pattern, name))
    return direct, list(conversions.values())
