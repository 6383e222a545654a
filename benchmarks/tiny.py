"""Architectures of `transformers` at tiny sizes: which classes there are, and configurations that are small.

A size is recognized by its name: `num_hidden_layers` and `encoder_layers` are numbers of layers, `hidden_size` and
`d_model` widths. All widths become the same, so that what must agree between towers does. What a table of names does
not get right for one model is tried again with fewer of them (`SCALES`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LAYERS, WIDTH, INNER, HEADS, KEY_HEADS, HEAD_WIDTH = 2, 32, 64, 4, 2, 8
VOCABULARY, POSITIONS, IMAGE, PATCH, EXPERTS, CLASSES = 64, 64, 32, 8, 4, 4

HEADS_OF_TASKS: Mapping[str, str] = {
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "text",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES": "speech to text",
    "MODEL_FOR_CTC_MAPPING_NAMES": "ctc",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "image and text",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": "image and text",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "image",
    "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES": "pixels",
    "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES": "masks",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES": "boxes",
    "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES": "video",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES": "audio",
    "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES": "pairs",
    "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING_NAMES": "image and question",
    "MODEL_FOR_TIME_SERIES_PREDICTION_MAPPING_NAMES": "series",
    "MODEL_FOR_TIME_SERIES_REGRESSION_MAPPING_NAMES": "series",
    "MODEL_FOR_TIME_SERIES_CLASSIFICATION_MAPPING_NAMES": "series",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "tokens",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "sequence",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "span",
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": "choice",
    "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES": "masked image",
    "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES": "outputs",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES": "outputs",
    "MODEL_FOR_RNNT_MAPPING_NAMES": "ctc",
    "MODEL_FOR_TDT_MAPPING_NAMES": "ctc",
    "MODEL_FOR_IMAGE_TO_IMAGE_MAPPING_NAMES": "outputs",
    "MODEL_FOR_KEYPOINT_DETECTION_MAPPING_NAMES": "outputs",
    "MODEL_FOR_POSE_ESTIMATION_MAPPING_NAMES": "outputs",
    "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES": "outputs",
    "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES": "outputs",
    "MODEL_FOR_BACKBONE_MAPPING_NAMES": "outputs",
    "MODEL_MAPPING_NAMES": "outputs",
}
"""Tables of `transformers`, the head that is preferred first, and what a batch for it holds. Masked before causal,
since encoders have both."""

WITHOUT_LOSS = "outputs"
"""The batch of models whose output has no loss: the squares of what they return are differentiated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model type, and its classes with the batch that each takes, the preferred one first."""

    name: str
    classes: tuple[tuple[str, str], ...]

    @property
    def has_loss(self) -> bool:
        return any(batch != WITHOUT_LOSS for _, batch in self.classes)


def architectures() -> tuple[Architecture, ...]:
    """Every model type that has a class, those with a loss first, each by name."""
    from transformers.models.auto import modeling_auto

    by_name: dict[str, dict[str, str]] = {}
    for table, batch in HEADS_OF_TASKS.items():
        for name, classes in getattr(modeling_auto, table, {}).items():
            for head in [classes] if isinstance(classes, str) else classes:
                by_name.setdefault(name, {}).setdefault(head, batch)
    every = [Architecture(name=name, classes=tuple(classes.items())) for name, classes in by_name.items()]
    return tuple(sorted(every, key=lambda a: (not a.has_loss, a.name)))


# ---- configurations --------------------------------------------------------------------------------

Rules = Sequence[tuple[str, Any]]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _window(old: Any) -> Any:
    return [4] * LAYERS if _is_list(old) else min(old, 4)


def _width(old: Any) -> Any:
    return _scaled(old) if _is_list(old) else min(old, WIDTH)


def _narrow(old: Any) -> Any:
    return WIDTH if isinstance(old, int) and old > WIDTH else old


def _scaled(old: Any) -> Any:
    """Widths of stages, the first 16 wide, in the same proportions."""
    if not _is_list(old) or not all(isinstance(o, int) for o in old) or not old[0]:
        return old
    return [max(16, 16 * o // old[0] // 16 * 16) for o in old]


DEPTH: Rules = (
    (r"(num_|n_)?((encoder|decoder|hidden|attention|text|vision|audio|speech|t2u|lstm)_)*layers?", LAYERS),
    (
        r"(num_)?(encoder|decoder|memory|conf|mask|text|parcae|folding|resampler|perceiver).*_(num_)?(hidden_)?layers",
        LAYERS,
    ),
    (
        r"depth|(num|n)_(hidden_groups|blocks)|.*_layers_per_(stack|block)|[lxr]_layers|num_self_attends_per_block",
        LAYERS,
    ),
    (r"(num|n)_(global|coda|adapter|dense|encoder|decoder|head|fov_head)_layers|resampler_depth|n_layer", LAYERS),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"num_kv_shared_layers|num_nextn_predict_layers", 0),
    (r"depths|blocks_per_stage|num_blocks_per_stage", lambda old: [1] * len(old)),
)
INPUTS: Rules = (
    (r"(.*_)?vocab(_size)?|.*_vocab_size|vocab_size_per_layer_input", VOCABULARY),
    (
        r"max_position.*|n_positions|n_ctx|max_(seq_len|source_positions|target_positions|2d_position_embeddings)",
        POSITIONS,
    ),
    (r".*max_position_embeddings|max_seq_length|seq_len|context_length|max_context_length", POSITIONS),
    (r"(pretrain_)?image_size|img_size|input_image_size", lambda old: [IMAGE] * len(old) if _is_list(old) else IMAGE),
    (r"patch_size", lambda old: min(old, PATCH) if isinstance(old, int) else old),
    (r"num_frames", 2),
    (r"num_queries|num_query_tokens|num_latents|num_denoising|two_stage_num_proposals", 8),
    (r"num_mel_bins|n_mels", 16),
    (r"num_labels|num_classes", CLASSES),
)
CORE: Rules = (
    (
        r"(.*_)?(num_|n_)?((encoder|decoder|self|cross|text|swa|linear|index)_)*(attention_|attn_)?(heads|n_head)",
        HEADS,
    ),
    (r"(swa_|cross_|decoder_|encoder_)?num_(key_value|kv)_heads|multi_query_group_num|n_head_kv", KEY_HEADS),
    (r"(.*_)?hidden_size|d_model|n_embd|(text_|vision_|out_)?embed_dim|hidden_dim|dim|embedding_size|emb_dim", _width),
    (r"(.*_)?(intermediate|feed_forward)_size|.*ffn_dim|d_ff|n_inner|d_inner|.*mlp_dim|ffn_hidden_size|ffn_dim", INNER),
    (r"(.*_)?dim_feedforward|feedforward_dim|.*intermediate_dim", INNER),
)
PARTS: Rules = (
    (r"(.*_)?head_dim|d_kv|attention_head_size|d_head|kv_channels|(linear_)?(key|value)_head_dim", HEAD_WIDTH),
    (r"v_head_dim|qk_nope_head_dim|qk_rope_head_dim|rotary_dim", HEAD_WIDTH),
    (r"(q|kv|o)_lora_rank|.*_rank", 16),
    (r"linear_num_(key|value)_heads|mamba_n_heads|mamba_num_heads", HEADS),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts", EXPERTS),
    (r"num_experts_per_(tok|token)|moe_(topk|k)", 2),
    (r"n_group|num_expert_group|topk_group|n_groups|mamba_n_groups", 1),
    (r"(mamba_d_)?(state_size|d_state)|ssm_state_size|mamba_d_state", HEAD_WIDTH),
    (r"(mamba_)?chunk_size|chunk_length", 4),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"sliding_window|attention_window(_size)?|local_attention|block_size|window_size", _window),
    (r"expert_capacity", 16),
    (r"mamba_d_ssm", INNER),
    (r"(hidden|embed|embedding|decoder_hidden|encoder_hidden|neck_hidden)_(sizes|dims)|embed_dim_per_stage", _scaled),
    (r"conv_dim", lambda old: [16] * len(old) if _is_list(old) else WIDTH),
    (r"num_conv_pos_embeddings", 8),
    (r"num_conv_pos_embedding_groups", 2),
    (r".*(_dim|_channels|_width|projection_size|proj_size|_units)|width|projection_dim", _narrow),
)

SCALES: tuple[Rules, ...] = ((*DEPTH, *INPUTS, *CORE, *PARTS), (*DEPTH, *INPUTS, *CORE), (*DEPTH, *INPUTS), DEPTH)
"""What is made small, from all to little: the first with which a model trains is taken."""

GIVEN: Mapping[str, Any] = {"num_experts_per_tok": 2, "vocab_size": VOCABULARY}
"""What has no default, and must be there."""

STILL: Mapping[str, Any] = {
    "use_cache": False,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "layerdrop": 0.0,
}
"""What would make a step random, or keep what a step does not need."""

FIRST_TOKENS: Mapping[str, int] = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "cls_token_id": 1,
    "sep_token_id": 2,
}


WITHOUT_TIMM: Mapping[str, Any] = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}


def _backbone() -> Any:
    """A backbone of `transformers` in the place of one of a package that need not be there."""
    from transformers import ResNetConfig

    stages = ["stage2", "stage3", "stage4"]
    return ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1] * 4, out_features=stages)


KINDS = ("layer_types", "layers_block_type")
"""Lists of the kinds of layers."""

STATE_HEADS = (
    ("expand", "num_heads", "head_dim"),
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("mamba_expand", "n_mamba_heads", "mamba_headdim"),
)
"""Of state-space models: the heads together are `expand` times as wide as the model."""


def _head_widths(default: Any, changed: Mapping[str, Any]) -> dict[str, int]:
    """The width of a head of state where it follows from the others."""
    widths = {}
    for expand, heads, width in STATE_HEADS:
        given = [changed.get(key, getattr(default, key, None)) for key in ("hidden_size", expand, heads, width)]
        if all(type(value) is int for value in given):
            inner = changed.get("mamba_d_ssm", getattr(default, "mamba_d_ssm", None)) or given[0] * given[1]
            widths[width] = inner // given[2]
    return widths


def _may_have_sections(key: str, old: Mapping[str, Any]) -> bool:
    """Whether a model may divide a head's rotation among axes by this; some have a default in code."""
    plain = key == "rope_parameters" and not any(isinstance(value, dict) for value in old.values())
    return plain or "mrope_section" in old


@dataclass
class Shrinking:
    """Makes configurations small by rules. A token's number is the same in all parts of one model."""

    rules: Rules
    tokens: dict[int, int] = field(default_factory=dict)

    def config(self, default: Any) -> Any:
        """A configuration of the same class."""
        kept = {k: v for k, v in default.to_diff_dict().items() if k in vars(default) and not isinstance(v, dict)}
        layers = [v for k, v in vars(default).items() if isinstance(v, int) and self._matches(DEPTH, k)]
        # a list with an item for each layer is made anew
        kept = {k: v for k, v in kept.items() if not (_is_list(v) and len(v) in layers)}
        for key in ("transformers_version", "model_type", "architectures", "dtype", "torch_dtype"):
            kept.pop(key, None)
        changed = {**kept, **dict(self._changes(default))}
        config = type(default)(**{**changed, **_head_widths(default, changed)})
        if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = FIRST_TOKENS["decoder_start_token_id"]
        return config

    def _changes(self, default: Any) -> Iterator[tuple[str, Any]]:
        # the kinds of layers last: they say how many there are
        for key, old in sorted(vars(default).items(), key=lambda item: item[0] in KINDS):
            if key.startswith("_"):
                continue
            if key in KINDS and _is_list(old):
                # a layer of each kind
                kinds = [*dict.fromkeys(old)]
                kinds = kinds if len(kinds) > 1 else LAYERS * kinds
                yield from ((key, kinds), ("num_hidden_layers", len(kinds)))
            elif getattr(old, "model_type", None) == "timm_backbone":
                yield from (("backbone_config", _backbone()), *WITHOUT_TIMM.items())
            elif isinstance(old, dict) and _may_have_sections(key, old) and self.rules in SCALES[:2]:
                # half of a head in three parts
                parts = [HEAD_WIDTH // 4, HEAD_WIDTH // 8, HEAD_WIDTH // 8]
                yield key, {**old, "mrope_section": parts}
            elif old is None and key in GIVEN:
                yield key, GIVEN[key]
            elif hasattr(old, "to_diff_dict"):
                yield key, self.config(old)
            elif key in STILL:
                yield key, STILL[key]
            elif "drop" in key and isinstance(old, float):
                yield key, 0.0
            elif re.fullmatch(r".*token_(id|index)", key) and (isinstance(old, int) or _is_list(old)):
                yield key, self._token(key, old)
            elif type(old) is int or _is_list(old):
                new = self._size(key, old)
                if new != old:
                    yield key, new

    def _token(self, key: str, old: Any) -> int:
        if key in FIRST_TOKENS:
            return FIRST_TOKENS[key]
        return self.tokens.setdefault(old[0] if _is_list(old) else old, VOCABULARY - 1 - len(self.tokens))

    def _size(self, key: str, old: Any) -> Any:
        for pattern, new in self.rules:
            if re.fullmatch(pattern, key):
                if callable(new):
                    return new(old)
                # a size that is off stays off
                return new if type(old) is int and old > new else old
        return old

    @staticmethod
    def _matches(rules: Rules, key: str) -> bool:
        return any(re.fullmatch(pattern, key) for pattern, _ in rules)
