"""Models of `transformers` at tiny sizes with random weights, unmodified, and batches for them.

`ZOO[name](layers)` is the case with that many layers (of each stack, where there are several). Nothing is
downloaded. Batches have padding, labels of which some are ignored, and the masks that the model takes;
dropout is 0, to compare with PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from models import BATCH, SEQUENCE, VOCABULARY, Case, gpt2, llama, perturbed

Batch = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]

WIDTH, HEADS, INNER = 32, 4, 48
IMAGE, PATCH, CLASSES, MELS, FRAMES, SAMPLES = 16, 4, 8, 16, 32, 320
IGNORED = -100

# what most configurations call these sizes
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 2 * SEQUENCE,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CAUSAL = {**TEXT, **SPECIAL, "use_cache": False}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
STILL_TEXT = {**TEXT, **STILL, "pad_token_id": 0}
STILL_IMAGE = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_labels": CLASSES,
    **STILL,
}


# ---- batches ---------------------------------------------------------------------------------------


def _random(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step)


def _ids(generator: torch.Generator, length: int = SEQUENCE) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=generator)


def _labels(generator: torch.Generator, length: int = SEQUENCE) -> torch.Tensor:
    """Labels ignored unevenly over the batch, and in one sequence all."""
    labels = _ids(generator, length)
    labels[: BATCH // 2, length // 2 :] = IGNORED
    labels[0] = IGNORED
    return labels


def _mask() -> torch.Tensor:
    """Sequences of several lengths, padded on the right."""
    return (torch.arange(SEQUENCE) < torch.arange(BATCH)[:, None] % 4 + SEQUENCE - 3).long()


def text(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = _random(step)
    return (), {"input_ids": _ids(generator), "attention_mask": _mask(), "labels": _labels(generator)}


def unmasked(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = _random(step)
    return (), {"input_ids": _ids(generator), "labels": _labels(generator)}


def detection(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Each token labelled 0 or 1."""
    generator = _random(step)
    labels = torch.randint(2, (BATCH, SEQUENCE), generator=generator)
    return (), {"input_ids": _ids(generator), "attention_mask": _mask(), "labels": labels}


def translation(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Targets of another length than the sources."""
    generator = _random(step)
    labels = _labels(generator, SEQUENCE // 2)
    return (), {"input_ids": _ids(generator), "attention_mask": _mask(), "labels": labels}


def _pixels(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)


def images(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = _random(step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return (), {"pixel_values": _pixels(generator), "labels": labels}


def pixel_classes(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = _random(step)
    labels = torch.randint(CLASSES, (BATCH, IMAGE, IMAGE), generator=generator)
    labels[0] = 255
    return (), {"pixel_values": _pixels(generator), "labels": labels}


def pairs(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Images with their texts, whose longest ends in the end token."""
    generator = _random(step)
    ids = _ids(generator)
    ids[torch.arange(BATCH), _mask().sum(1) - 1] = 2
    return (), {
        "input_ids": ids,
        "attention_mask": _mask(),
        "pixel_values": _pixels(generator),
        "return_loss": True,
    }


def spectrograms(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = _random(step)
    features = torch.randn(BATCH, MELS, FRAMES, generator=generator)
    return (), {"input_features": features, "labels": _labels(generator)}


def waves(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = _random(step)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return (), {"input_values": torch.randn(BATCH, SAMPLES, generator=generator), "labels": labels}


IMAGE_TOKEN = VOCABULARY - 1


def dialogues(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Texts that begin with the places of an image's patches."""
    generator = _random(step)
    ids = torch.randint(3, IMAGE_TOKEN, (BATCH, SEQUENCE), generator=generator)
    places = torch.full((BATCH, (IMAGE // PATCH) ** 2), IMAGE_TOKEN)
    labels = torch.cat([torch.full_like(places, IGNORED), _labels(generator)], dim=1)
    return (), {"input_ids": torch.cat([places, ids], dim=1), "pixel_values": _pixels(generator), "labels": labels}


# ---- models of the issue ---------------------------------------------------------------------------


def _gpt2(layers: int) -> Case:
    return Case(model=gpt2(layers), batch=unmasked)


def _llama(layers: int) -> Case:
    return Case(model=llama(layers), batch=unmasked)


def _llama_tied(layers: int) -> Case:
    return Case(model=llama(layers, tie_word_embeddings=True), batch=text)


def _qwen3(layers: int) -> Case:
    config = hf.Qwen3Config(**CAUSAL, num_hidden_layers=layers, num_key_value_heads=2, head_dim=8)
    return Case(model=hf.Qwen3ForCausalLM(config), batch=text)


def _bert(layers: int) -> Case:
    return Case(model=hf.BertForMaskedLM(hf.BertConfig(**STILL_TEXT, num_hidden_layers=layers)), batch=text)


def _roberta(layers: int) -> Case:
    return Case(model=hf.RobertaForMaskedLM(hf.RobertaConfig(**STILL_TEXT, num_hidden_layers=layers)), batch=text)


def _deberta(layers: int) -> Case:
    config = hf.DebertaConfig(
        **STILL_TEXT, num_hidden_layers=layers, relative_attention=True, pos_att_type=["c2p", "p2c"]
    )
    return Case(model=hf.DebertaForMaskedLM(config), batch=text)


def _deberta_v2(layers: int) -> Case:
    config = hf.DebertaV2Config(
        **STILL_TEXT,
        num_hidden_layers=layers,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    )
    return Case(model=hf.DebertaV2ForMaskedLM(config), batch=text)


def _t5(layers: int) -> Case:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=INNER,
        num_layers=layers,
        num_heads=HEADS,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return Case(model=hf.T5ForConditionalGeneration(config), batch=translation)


def _vit(layers: int) -> Case:
    return Case(model=hf.ViTForImageClassification(hf.ViTConfig(**STILL_IMAGE, num_hidden_layers=layers)), batch=images)


def _mixtral(layers: int) -> Case:
    config = hf.MixtralConfig(
        **CAUSAL,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    return Case(model=hf.MixtralForCausalLM(config), batch=unmasked)


def _qwen3_moe(layers: int) -> Case:
    config = hf.Qwen3MoeConfig(
        **CAUSAL,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    )
    return Case(model=hf.Qwen3MoeForCausalLM(config), batch=unmasked)


def _mamba(layers: int) -> Case:
    config = hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, state_size=8, num_hidden_layers=layers, use_cache=False, **SPECIAL
    )
    return Case(model=hf.MambaForCausalLM(config), batch=unmasked)


def _mamba2(layers: int) -> Case:
    config = hf.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=8,
        num_hidden_layers=layers,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
        use_cache=False,
        **SPECIAL,
    )
    return Case(model=hf.Mamba2ForCausalLM(config), batch=unmasked)


def _whisper(layers: int) -> Case:
    config = hf.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=MELS,
        d_model=WIDTH,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_source_positions=FRAMES // 2,
        max_target_positions=SEQUENCE,
        dropout=0.0,
        decoder_start_token_id=1,
        use_cache=False,
        **SPECIAL,
    )
    return Case(model=hf.WhisperForConditionalGeneration(config), batch=spectrograms)


def _bart(layers: int) -> Case:
    config = hf.BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_position_embeddings=SEQUENCE,
        dropout=0.0,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        use_cache=False,
        **SPECIAL,
    )
    return Case(model=hf.BartForConditionalGeneration(config), batch=translation)


def _clip(layers: int) -> Case:
    towers = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": HEADS}
    config = hf.CLIPConfig(
        text_config={**TEXT, **SPECIAL, "num_hidden_layers": layers, "projection_dim": WIDTH},
        vision_config={
            **towers,
            "num_hidden_layers": layers,
            "image_size": IMAGE,
            "patch_size": PATCH,
            "projection_dim": WIDTH,
        },
        projection_dim=WIDTH,
    )
    return Case(model=hf.CLIPModel(config), batch=pairs)


# ---- other models ----------------------------------------------------------------------------------


def _gemma(layers: int) -> Case:
    config = hf.GemmaConfig(**CAUSAL, num_hidden_layers=layers, num_key_value_heads=1, head_dim=8)
    return Case(model=hf.GemmaForCausalLM(config), batch=text)


def _gemma2(layers: int) -> Case:
    config = hf.Gemma2Config(**CAUSAL, num_hidden_layers=layers, num_key_value_heads=2, head_dim=8, sliding_window=4)
    return Case(model=hf.Gemma2ForCausalLM(config), batch=text)


def _gemma3(layers: int) -> Case:
    config = hf.Gemma3TextConfig(
        **CAUSAL, num_hidden_layers=layers, num_key_value_heads=2, head_dim=8, sliding_window=4
    )
    return Case(model=hf.Gemma3ForCausalLM(config), batch=text)


def _phi(layers: int) -> Case:
    config = hf.PhiConfig(**CAUSAL, num_hidden_layers=layers, resid_pdrop=0.0, embd_pdrop=0.0)
    return Case(model=hf.PhiForCausalLM(config), batch=text)


def _phi3(layers: int) -> Case:
    config = hf.Phi3Config(**CAUSAL, num_hidden_layers=layers, num_key_value_heads=2)
    return Case(model=hf.Phi3ForCausalLM(config), batch=text)


def _mistral(layers: int) -> Case:
    config = hf.MistralConfig(**CAUSAL, num_hidden_layers=layers, num_key_value_heads=2, sliding_window=4)
    return Case(model=hf.MistralForCausalLM(config), batch=text)


def _qwen2(layers: int) -> Case:
    config = hf.Qwen2Config(**CAUSAL, num_hidden_layers=layers, num_key_value_heads=2)
    return Case(model=hf.Qwen2ForCausalLM(config), batch=text)


def _falcon(layers: int) -> Case:
    config = hf.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        ffn_hidden_size=INNER,
        use_cache=False,
        **SPECIAL,
    )
    return Case(model=hf.FalconForCausalLM(config), batch=text)


def _opt(layers: int) -> Case:
    config = hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        ffn_dim=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        word_embed_proj_dim=WIDTH,
        max_position_embeddings=SEQUENCE,
        dropout=0.0,
        use_cache=False,
        **SPECIAL,
    )
    return Case(model=hf.OPTForCausalLM(config), batch=text)


def _gpt_neox(layers: int) -> Case:
    return Case(model=hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**CAUSAL, num_hidden_layers=layers)), batch=text)


def _gptj(layers: int) -> Case:
    config = hf.GPTJConfig(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=WIDTH,
        n_layer=layers,
        n_head=HEADS,
        rotary_dim=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return Case(model=hf.GPTJForCausalLM(config), batch=text)


def _bloom(layers: int) -> Case:
    config = hf.BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        n_layer=layers,
        n_head=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
        **SPECIAL,
    )
    return Case(model=hf.BloomForCausalLM(config), batch=text)


def _mpt(layers: int) -> Case:
    config = hf.MptConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        n_heads=HEADS,
        n_layers=layers,
        max_seq_len=SEQUENCE,
        expansion_ratio=2,
        use_cache=False,
    )
    return Case(model=hf.MptForCausalLM(config), batch=text)


def _stablelm(layers: int) -> Case:
    config = hf.StableLmConfig(**CAUSAL, num_hidden_layers=layers, num_key_value_heads=2)
    return Case(model=hf.StableLmForCausalLM(config), batch=text)


def _starcoder2(layers: int) -> Case:
    config = hf.Starcoder2Config(
        **CAUSAL, num_hidden_layers=layers, num_key_value_heads=2, residual_dropout=0.0, embedding_dropout=0.0
    )
    return Case(model=hf.Starcoder2ForCausalLM(config), batch=text)


def _cohere(layers: int) -> Case:
    config = hf.CohereConfig(**CAUSAL, num_hidden_layers=layers, num_key_value_heads=2)
    return Case(model=hf.CohereForCausalLM(config), batch=text)


def _olmo(layers: int) -> Case:
    return Case(model=hf.OlmoForCausalLM(hf.OlmoConfig(**CAUSAL, num_hidden_layers=layers)), batch=text)


def _olmo2(layers: int) -> Case:
    return Case(model=hf.Olmo2ForCausalLM(hf.Olmo2Config(**CAUSAL, num_hidden_layers=layers)), batch=text)


def _olmoe(layers: int) -> Case:
    config = hf.OlmoeConfig(**CAUSAL, num_hidden_layers=layers, num_experts=4, num_experts_per_tok=2)
    return Case(model=hf.OlmoeForCausalLM(config), batch=unmasked)


def _granite(layers: int) -> Case:
    config = hf.GraniteConfig(**CAUSAL, num_hidden_layers=layers, num_key_value_heads=2)
    return Case(model=hf.GraniteForCausalLM(config), batch=text)


def _bamba(layers: int) -> Case:
    config = hf.BambaConfig(
        **CAUSAL,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        attn_layer_indices=[layers - 1],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_chunk_size=4,
    )
    return Case(model=hf.BambaForCausalLM(config), batch=unmasked)


def _distilbert(layers: int) -> Case:
    config = hf.DistilBertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        dim=WIDTH,
        hidden_dim=INNER,
        n_layers=layers,
        n_heads=HEADS,
        dropout=0.0,
        attention_dropout=0.0,
    )
    return Case(model=hf.DistilBertForMaskedLM(config), batch=text)


def _albert(layers: int) -> Case:
    config = hf.AlbertConfig(**STILL_TEXT, num_hidden_layers=layers, embedding_size=16)
    return Case(model=hf.AlbertForMaskedLM(config), batch=text)


def _electra(layers: int) -> Case:
    config = hf.ElectraConfig(**STILL_TEXT, num_hidden_layers=layers, embedding_size=16)
    return Case(model=hf.ElectraForPreTraining(config), batch=detection)


def _modernbert(layers: int) -> Case:
    config = hf.ModernBertConfig(
        **TEXT, num_hidden_layers=layers, local_attention=4, pad_token_id=0, cls_token_id=1, sep_token_id=2
    )
    return Case(model=hf.ModernBertForMaskedLM(config), batch=text)


def _xlnet(layers: int) -> Case:
    config = hf.XLNetConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        n_layer=layers,
        n_head=HEADS,
        d_inner=INNER,
        dropout=0.0,
        use_mems_train=False,
    )
    return Case(model=hf.XLNetLMHeadModel(config), batch=text)


def _pegasus(layers: int) -> Case:
    config = hf.PegasusConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=INNER,
        decoder_ffn_dim=INNER,
        max_position_embeddings=SEQUENCE,
        dropout=0.0,
        decoder_start_token_id=0,
        use_cache=False,
        **SPECIAL,
    )
    return Case(model=hf.PegasusForConditionalGeneration(config), batch=translation)


def _deit(layers: int) -> Case:
    config = hf.DeiTConfig(**STILL_IMAGE, num_hidden_layers=layers)
    return Case(model=hf.DeiTForImageClassification(config), batch=images)


def _dinov2(layers: int) -> Case:
    config = hf.Dinov2Config(**STILL_IMAGE, num_hidden_layers=layers, mlp_ratio=2)
    return Case(model=hf.Dinov2ForImageClassification(config), batch=images)


def _swin(layers: int) -> Case:
    config = hf.SwinConfig(
        image_size=2 * IMAGE,
        patch_size=PATCH,
        embed_dim=16,
        depths=[layers, layers],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
        num_labels=CLASSES,
    )
    return Case(model=hf.SwinForImageClassification(config), batch=large_images)


def large_images(step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = _random(step)
    pixels = torch.randn(BATCH, 3, 2 * IMAGE, 2 * IMAGE, generator=generator)
    return (), {"pixel_values": pixels, "labels": torch.randint(CLASSES, (BATCH,), generator=generator)}


def _convnext(layers: int) -> Case:
    config = hf.ConvNextConfig(
        patch_size=2, num_stages=2, hidden_sizes=[8, 16], depths=[layers, layers], num_labels=CLASSES, image_size=IMAGE
    )
    return Case(model=hf.ConvNextForImageClassification(config), batch=images)


def _resnet(layers: int) -> Case:
    config = hf.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[layers, layers],
        layer_type="basic",
        num_labels=CLASSES,
    )
    return Case(model=hf.ResNetForImageClassification(config), batch=images)


def _segformer(layers: int) -> Case:
    config = hf.SegformerConfig(
        num_encoder_blocks=2,
        depths=[layers, layers],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        decoder_hidden_size=16,
        num_labels=CLASSES,
        **STILL,
    )
    return Case(model=hf.SegformerForSemanticSegmentation(config), batch=pixel_classes)


def _wav2vec2(layers: int) -> Case:
    config = hf.Wav2Vec2Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        conv_dim=[16, 16],
        conv_stride=[5, 4],
        conv_kernel=[10, 4],
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        num_labels=CLASSES,
        classifier_proj_size=16,
    )
    return Case(model=hf.Wav2Vec2ForSequenceClassification(config), batch=waves)


def _llava(layers: int) -> Case:
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(
            **{**CAUSAL, "max_position_embeddings": 64}, num_hidden_layers=layers, num_key_value_heads=2
        ),
        vision_config=hf.CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            image_size=IMAGE,
            patch_size=PATCH,
        ),
        image_token_index=IMAGE_TOKEN,
        image_seq_length=(IMAGE // PATCH) ** 2,
        vision_feature_layer=-1,
    )
    return Case(model=hf.LlavaForConditionalGeneration(config), batch=dialogues)


# ---- the tables ------------------------------------------------------------------------------------

# ---- this repository's own -------------------------------------------------------------------------

sys.path.append(str(Path(__file__).parents[2] / "examples"))


def _example_resnet(layers: int) -> Case:
    import resnet

    return _double(resnet.ResNet((layers, layers), 8), resnet.batches(1, BATCH, 32)[0])


def _example_unet(layers: int) -> Case:
    import unet

    return _double(unet.UNet((8, 16, 24)[: layers + 1], "batch"), unet.batches(1, BATCH, 16)[0])


def _double(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Case:
    """In float64: the gradient of a bias before batch norm is zero but for rounding."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}
    return Case(model=model.double(), batch=lambda step: ((), wide))


ISSUE: Mapping[str, Callable[[int], Case]] = {
    "GPT-2": _gpt2,
    "Llama": _llama,
    "Llama, tied": _llama_tied,
    "Qwen3": _qwen3,
    "BERT": _bert,
    "RoBERTa": _roberta,
    "DeBERTa": _deberta,
    "DeBERTa-v2": _deberta_v2,
    "T5": _t5,
    "ViT": _vit,
    "Mixtral": _mixtral,
    "Qwen3-MoE": _qwen3_moe,
    "Mamba": _mamba,
    "Mamba-2": _mamba2,
    "Whisper": _whisper,
    "BART": _bart,
    "CLIP": _clip,
    "examples/unet.py": _example_unet,
    "examples/resnet.py": _example_resnet,
}

OTHERS: Mapping[str, Callable[[int], Case]] = {
    "Gemma": _gemma,
    "Gemma-2": _gemma2,
    "Gemma-3": _gemma3,
    "Phi": _phi,
    "Phi-3": _phi3,
    "Mistral": _mistral,
    "Qwen2": _qwen2,
    "Falcon": _falcon,
    "OPT": _opt,
    "GPT-NeoX": _gpt_neox,
    "GPT-J": _gptj,
    "Bloom": _bloom,
    "MPT": _mpt,
    "StableLM": _stablelm,
    "StarCoder2": _starcoder2,
    "Cohere": _cohere,
    "OLMo": _olmo,
    "OLMo-2": _olmo2,
    "OLMoE": _olmoe,
    "Granite": _granite,
    "Bamba": _bamba,
    "DistilBERT": _distilbert,
    "ALBERT": _albert,
    "ELECTRA": _electra,
    "ModernBERT": _modernbert,
    "XLNet": _xlnet,
    "Pegasus": _pegasus,
    "DeiT": _deit,
    "DINOv2": _dinov2,
    "Swin": _swin,
    "ConvNeXt": _convnext,
    "ResNet": _resnet,
    "SegFormer": _segformer,
    "wav2vec 2.0": _wav2vec2,
    "LLaVA": _llava,
}

ZOO: Mapping[str, Callable[[int], Case]] = {**ISSUE, **OTHERS}


def case(name: str, layers: int = 2) -> Case:
    """The case with the same weights in every process."""
    torch.manual_seed(0)
    return perturbed(ZOO[name](layers))


def dropping(case: Case, rate: float) -> Case:
    """The same case with dropout at this rate wherever its model has a dropout (of whole layers: not)."""
    for module in case.model.modules():
        rates = {n for n, v in vars(module).items() if "drop" in n and "layer" not in n and type(v) in (int, float)}
        for name in rates | ({"p"} if isinstance(module, torch.nn.Dropout) else set()):
            setattr(module, name, rate)
    return case
