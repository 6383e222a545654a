"""The one place that touches private torch API. It serves torch 2.11, 2.12 and 2.13.

Everything here is thin: a name of ours for something of torch's that may move between versions. Importing it under
another torch raises `ImportError`.
"""

# ruff: noqa: I001 (the version first: under another torch nothing else here can be imported)
from .versions import SERVED as SERVED

from .autocast import (
    autocast_dtype as autocast_dtype,
    autocast_of as autocast_of,
    cast_by_autocast as cast_by_autocast,
)
from .checkpoints import (
    SAFETENSORS_DTYPES as SAFETENSORS_DTYPES,
    SafetensorsReader as SafetensorsReader,
    Stored as Stored,
)
from .converting import (
    Conversion as Conversion,
    stored_names as stored_names,
)
from .devices import devices_of as devices_of
from .distributed import (
    all_gather_single as all_gather_single,
    control_channel as control_channel,
    dtensors_of as dtensors_of,
    follow_world_timeout as follow_world_timeout,
    from_host_alone as from_host_alone,
    keep_until_exit as keep_until_exit,
    local_tensor as local_tensor,
    make_dtensor as make_dtensor,
    patient as patient,
    reduce_scatter_single as reduce_scatter_single,
)
from .fx_nodes import called_whole as called_whole
from .neutral import (
    causal_biases as causal_biases,
    neutral as neutral,
    plain_attention as plain_attention,
    without_autocast as without_autocast,
)
from .optimizing import (
    around_checkpoints as around_checkpoints,
    bare_step as bare_step,
    first_states as first_states,
    fused_steps_on_shards as fused_steps_on_shards,
    muon_rate as muon_rate,
    orthogonalized as orthogonalized,
    Shapes as Shapes,
)
from .patching import patched as patched
from .recording import (
    Again as Again,
    followed as followed,
    function_modes as function_modes,
    Whereabouts as Whereabouts,
)
from .redistributing import (
    full_tensor as full_tensor,
    redistributed as redistributed,
    strided_shard as strided_shard,
)
from .tensors import (
    attention_kernel as attention_kernel,
    backward_running as backward_running,
    by_tensor as by_tensor,
    fake_mode as fake_mode,
    is_differentiated as is_differentiated,
    is_fake as is_fake,
    is_observed as is_observed,
    is_plain as is_plain,
    is_profiling as is_profiling,
    is_real as is_real,
    is_torchs as is_torchs,
    is_transformed as is_transformed,
    memory_of as memory_of,
    norm_dtype as norm_dtype,
    notes_of as notes_of,
    receiver as receiver,
    RECORDED as RECORDED,
    stand_in as stand_in,
    statistics_dtype as statistics_dtype,
    storage_span as storage_span,
    take_notes as take_notes,
    uncompiled as uncompiled,
    unmodified as unmodified,
    unseen as unseen,
    value_of as value_of,
    versions as versions,
)
from .waiting import name_waits as name_waits
from .watching import (
    annotated as annotated,
    asking_for_inference as asking_for_inference,
    COLLECTIVES as COLLECTIVES,
    decides_by_data as decides_by_data,
    global_hooks as global_hooks,
    gradient_hooks as gradient_hooks,
    hook_gradient as hook_gradient,
    HOOKS as HOOKS,
    hooks_gradient as hooks_gradient,
    is_of_sparse as is_of_sparse,
    is_product as is_product,
    is_stepped_in_backward as is_stepped_in_backward,
    leaves_numbers as leaves_numbers,
    property_of as property_of,
    raised_by as raised_by,
    raised_by_product as raised_by_product,
    seeding as seeding,
    SETTINGS as SETTINGS,
    SETTINGS_AT_WORK as SETTINGS_AT_WORK,
    sizes_by_values as sizes_by_values,
    unrecordable as unrecordable,
    Watching as Watching,
    WritesInput as WritesInput,
    WritesReal as WritesReal,
    written_by as written_by,
)
from .wrapping import (
    HOOKS_OF_STATES as HOOKS_OF_STATES,
    plain_name as plain_name,
    rebind_state_hooks as rebind_state_hooks,
    reduces_itself as reduces_itself,
    unwrapped as unwrapped,
)
