"""The one place that touches private torch API. It serves torch 2.11, 2.12 and 2.13.

Everything here is thin: a name of ours for something of torch's that may move between versions. Importing it under
another torch raises `ImportError`.
"""

# ruff: noqa: I001 (the version first: under another torch nothing else here can be imported)
from .versions import SERVED as SERVED

from .checkpoints import SAFETENSORS_DTYPES as SAFETENSORS_DTYPES
from .checkpoints import SafetensorsReader as SafetensorsReader
from .checkpoints import Stored as Stored
from .distributed import all_gather_single as all_gather_single
from .distributed import dtensors_of as dtensors_of
from .distributed import follow_world_timeout as follow_world_timeout
from .distributed import local_tensor as local_tensor
from .distributed import make_dtensor as make_dtensor
from .distributed import patient as patient
from .distributed import reduce_scatter_single as reduce_scatter_single
from .distributed import strided_shard as strided_shard
from .exporting import as_exported as as_exported
from .exporting import causal_biases as causal_biases
from .exporting import plain_attention as plain_attention
from .exporting import without_autocast as without_autocast
from .joint import Joint as Joint
from .joint import Placeholder as Placeholder
from .joint import Result as Result
from .joint import joint as joint
from .joint import is_accumulation as is_accumulation
from .joint import is_backward as is_backward
from .joint import module_path as module_path
from .exporting import patched as patched
from .optimizing import bare_step as bare_step
from .optimizing import fused_steps_on_shards as fused_steps_on_shards
from .optimizing import muon_rate as muon_rate
from .optimizing import orthogonalized as orthogonalized
from .recording import Recorded as Recorded
from .recording import RecordedInput as RecordedInput
from .recording import is_recorded_function as is_recorded_function
from .recording import place_of as place_of
from .recording import recorded as recorded
from .recording import set_place as set_place
from .autocast import autocast_dtype as autocast_dtype
from .autocast import autocast_of as autocast_of
from .autocast import cast_by_autocast as cast_by_autocast
from .devices import devices_of as devices_of
from .tensors import attention_kernel as attention_kernel
from .tensors import by_tensor as by_tensor
from .tensors import fake_mode as fake_mode
from .tensors import is_fake as is_fake
from .tensors import is_observed as is_observed
from .tensors import is_plain as is_plain
from .tensors import is_profiling as is_profiling
from .tensors import is_real as is_real
from .tensors import is_torchs as is_torchs
from .tensors import memory_of as memory_of
from .tensors import norm_dtype as norm_dtype
from .tensors import notes_of as notes_of
from .tensors import number_of as number_of
from .tensors import shell as shell
from .tensors import stand_in as stand_in
from .tensors import statistics_dtype as statistics_dtype
from .tensors import storage_span as storage_span
from .tensors import take_notes as take_notes
from .tensors import uncompiled as uncompiled
from .tensors import unmodified as unmodified
from .tensors import value_of as value_of
from .tensors import version as version
from .tensors import versions as versions
from .watching import Watching as Watching
from .watching import WritesInput as WritesInput
from .watching import WritesReal as WritesReal
from .watching import decides_by_data as decides_by_data
from .watching import differentiating as differentiating
from .watching import global_backward_hooks as global_backward_hooks
from .watching import global_forward_hooks as global_forward_hooks
from .watching import hook_registries as hook_registries
from .watching import hooks_gradient as hooks_gradient
from .watching import hooks_gradients as hooks_gradients
from .watching import leaves_numbers as leaves_numbers
from .watching import SETTINGS as SETTINGS
from .watching import SETTINGS_AT_WORK as SETTINGS_AT_WORK
from .watching import asking_for_inference as asking_for_inference
from .watching import saving as saving
from .watching import seeding as seeding
from .watching import suspended_in_branches as suspended_in_branches
from .watching import without_modes as without_modes
from .watching import written_by as written_by
