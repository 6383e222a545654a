"""The one place that touches private torch API. It serves torch 2.11, 2.12 and 2.13.

Everything here is thin: a name of ours for something of torch's that may move between versions. Importing it under
another torch raises `ImportError`.
"""

# ruff: noqa: I001 (the version first: under another torch nothing else here can be imported)
from .versions import SERVED as SERVED

from .checkpoints import SAFETENSORS_DTYPES as SAFETENSORS_DTYPES
from .checkpoints import SafetensorsReader as SafetensorsReader
from .checkpoints import Stored as Stored
from .converting import Conversion as Conversion
from .converting import stored_names as stored_names
from .distributed import all_gather_single as all_gather_single
from .distributed import control_channel as control_channel
from .distributed import dtensors_of as dtensors_of
from .distributed import follow_world_timeout as follow_world_timeout
from .distributed import from_host_alone as from_host_alone
from .distributed import keep_until_exit as keep_until_exit
from .distributed import local_tensor as local_tensor
from .distributed import make_dtensor as make_dtensor
from .distributed import patient as patient
from .distributed import reduce_scatter_single as reduce_scatter_single
from .neutral import causal_biases as causal_biases
from .neutral import neutral as neutral
from .neutral import plain_attention as plain_attention
from .neutral import without_autocast as without_autocast
from .patching import patched as patched
from .optimizing import bare_step as bare_step
from .optimizing import fused_steps_on_shards as fused_steps_on_shards
from .optimizing import muon_rate as muon_rate
from .optimizing import orthogonalized as orthogonalized
from .recording import Whereabouts as Whereabouts
from .recording import followed as followed
from .redistributing import full_tensor as full_tensor
from .redistributing import redistributed as redistributed
from .redistributing import strided_shard as strided_shard
from .autocast import autocast_dtype as autocast_dtype
from .autocast import autocast_of as autocast_of
from .autocast import cast_by_autocast as cast_by_autocast
from .devices import devices_of as devices_of
from .tensors import RECORDED as RECORDED
from .tensors import attention_kernel as attention_kernel
from .tensors import by_tensor as by_tensor
from .tensors import fake_mode as fake_mode
from .tensors import is_fake as is_fake
from .tensors import is_observed as is_observed
from .tensors import is_plain as is_plain
from .tensors import is_profiling as is_profiling
from .tensors import is_real as is_real
from .tensors import is_torchs as is_torchs
from .tensors import is_transformed as is_transformed
from .tensors import memory_of as memory_of
from .tensors import norm_dtype as norm_dtype
from .tensors import notes_of as notes_of
from .tensors import number_of as number_of
from .tensors import receiver as receiver
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
from .watching import annotated as annotated
from .watching import decides_by_data as decides_by_data
from .watching import global_hooks as global_hooks
from .watching import gradient_hooks as gradient_hooks
from .watching import hook_registries as hook_registries
from .watching import is_stepped_in_backward as is_stepped_in_backward
from .watching import leaves_numbers as leaves_numbers
from .watching import SETTINGS as SETTINGS
from .watching import SETTINGS_AT_WORK as SETTINGS_AT_WORK
from .watching import asking_for_inference as asking_for_inference
from .watching import seeding as seeding
from .watching import property_of as property_of
from .watching import sizes_by_values as sizes_by_values
from .watching import unrecordable as unrecordable
from .watching import without_modes as without_modes
from .watching import written_by as written_by
