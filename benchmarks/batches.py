"""Batches for models of `transformers`, by the names of what their forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from tiny import CLASSES, IMAGE
from torch.utils import _pytree as pytree

BATCH, SEQUENCE, SAMPLES, FRAMES, VIDEO_FRAMES = 4, 16, 800, 64, 2
GRID = 4
"""Patches along a side of an image that is given as a list of patches."""
IGNORED = -100
TOKENS = 40
"""Random tokens are below this: those above have meanings, such as the place of an image."""

Batch = dict[str, Any]


class Batches:
    """Batches for one model, each drawn alike. `turned` has lists of images for images, and spectrograms with time
    last."""

    def __init__(self, model: Any, dtype: torch.dtype, turned: bool = False) -> None:
        self.model, self.config, self.dtype = model, model.config, dtype
        self.turned = turned
        self.takes = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(0)

    def of(self, kind: str) -> Iterator[Batch]:
        """Batches with what a loss needs, the most telling one first."""
        self.generator.manual_seed(0)
        inputs = self.inputs()
        labels = LABELS.get(kind)
        if labels is not None:
            for labelled in labels(self, inputs):
                yield {**inputs, **labelled}
                if "attention_mask" in inputs:
                    yield {**{k: v for k, v in inputs.items() if k != "attention_mask"}, **labelled}
        else:
            yield inputs

    # -- inputs

    def inputs(self) -> Batch:
        batch: Batch = {}
        for name in self.takes:
            if name == "pixel_values_videos" and self.model.main_input_name != name:
                continue
            if make := INPUTS.get(name):
                batch[name] = make(self)
        for name, turn in TURNED.items() if self.turned else ():
            if name in batch:
                batch[name] = turn(batch[name])
        if "pixel_values" in batch and "input_ids" in batch:
            self._placed(batch, "get_image_features", "pixel_values", ("image_token_id", "image_token_index"))
        if "input_features" in batch and "input_ids" in batch:
            self._placed(batch, "get_audio_features", "input_features", ("audio_token_id", "audio_token_index"))
        if "input_ids" in batch and "attention_mask" in self.takes:
            batch["attention_mask"] = self._mask(batch["input_ids"].shape[1])
        if "input_ids" in batch and "decoder_input_ids" in self.takes and not self.config.is_encoder_decoder:
            batch["decoder_input_ids"] = self._ids(SEQUENCE // 2)
        if "return_loss" in self.takes:
            batch["return_loss"] = True
        return batch

    def _placed(self, batch: Batch, method: str, of: str, names: tuple[str, ...]) -> None:
        """Puts as many places for features into the text as there are."""
        token = next((t for n in names if isinstance(t := getattr(self.config, n, None), int)), None)
        if token is None or not hasattr(self.model, method):
            return
        taken = inspect.signature(getattr(self.model, method)).parameters
        with torch.no_grad():
            features = getattr(self.model, method)(
                **{of: batch[of]} | {name: batch[name] for name in taken if name in batch}
            )
        features = getattr(features, "pooler_output", features)
        rows = sum(f.numel() // f.shape[-1] for f in pytree.tree_leaves(features) if isinstance(f, torch.Tensor))
        places = torch.full((BATCH, rows // BATCH), token)
        batch["input_ids"] = torch.cat([batch["input_ids"][:, :1], places, batch["input_ids"][:, 1:]], 1)
        if "mm_token_type_ids" in self.takes:
            batch["mm_token_type_ids"] = (batch["input_ids"] == token).int()

    def _ids(self, length: int = SEQUENCE) -> torch.Tensor:
        ids = torch.randint(3, TOKENS, (BATCH, length), generator=self.generator)
        ids[:, -1] = 2
        return ids

    def _mask(self, length: int) -> torch.Tensor:
        """Sequences of several lengths, padded on the right."""
        return (torch.arange(length) < length - torch.arange(BATCH)[:, None] % 3).long()

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def _below(self, bound: int, *shape: int) -> torch.Tensor:
        return torch.randint(bound, shape, generator=self.generator)

    def _vision(self, *names: str) -> Any:
        """An attribute of the configuration, or of its tower for images."""
        for config in (getattr(self.config, "vision_config", None), getattr(self.config, "encoder", None), self.config):
            for name in names:
                if (value := getattr(config, name, None)) is not None:
                    return value
        return None

    def pixels(self) -> torch.Tensor:
        size = self._vision("image_size", "img_size") or 2 * IMAGE
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = self._vision("num_channels", "in_channels", "in_chans") or 3
        channels = channels if isinstance(channels, int) else 3
        if "image_grid_thw" in self.takes:
            patch, frames = self._vision("patch_size") or 14, self._vision("temporal_patch_size") or 1
            return self._randn(BATCH * GRID**2, channels * frames * patch**2)
        if "patch_size" in vars(self.config) and hasattr(self.config, "tubelet_size"):
            frames = getattr(self.config, "num_frames", None) or getattr(self.config, "frames_per_clip", VIDEO_FRAMES)
            return self._randn(BATCH, frames, channels, height, width)
        return self._randn(BATCH, channels, height, width)

    def waves(self) -> torch.Tensor:
        if hasattr(self.config, "max_length") and hasattr(self.config, "num_mel_bins"):
            return self._randn(BATCH, self.config.max_length, self.config.num_mel_bins)
        return self._randn(BATCH, SAMPLES)

    def spectrograms(self) -> torch.Tensor:
        config = getattr(self.config, "audio_config", None) or getattr(self.config, "encoder_config", self.config)
        mels = next(
            (
                v
                for n in (
                    "num_mel_bins",
                    "feature_size",
                    "input_feat_per_channel",
                    "input_dim",
                    "feature_projection_input_dim",
                )
                if (v := getattr(config, n, None) or getattr(self.config, n, None))
            ),
            16,
        )
        positions = getattr(config, "max_source_positions", None)
        if (
            self.model.main_input_name == "input_features"
            and positions
            and "input_feat_per_channel" not in vars(config)
        ):
            return self._randn(BATCH, mels, 2 * positions)
        return self._randn(BATCH, FRAMES, mels)

    def past(self) -> torch.Tensor:
        length = getattr(self.config, "context_length", None) or SEQUENCE
        lags = getattr(self.config, "lags_sequence", None)
        length += max(lags) if lags and "past_time_features" in self.takes else 0
        size = getattr(self.config, "num_input_channels", None) or getattr(self.config, "input_size", 1)
        flat = size == 1 and not hasattr(self.config, "num_input_channels")
        return self._randn(BATCH, length) if flat else self._randn(BATCH, length, size)

    def future(self) -> torch.Tensor:
        length = getattr(self.config, "prediction_length", None) or getattr(self.config, "horizon_length", 8)
        size = getattr(self.config, "num_input_channels", None) or getattr(self.config, "input_size", 1)
        flat = size == 1 and not hasattr(self.config, "num_input_channels")
        return self._randn(BATCH, length) if flat else self._randn(BATCH, length, size)

    def time_features(self, like: torch.Tensor) -> torch.Tensor:
        return self._randn(*like.shape[:2], max(getattr(self.config, "num_time_features", 0), 0))


INPUTS: Mapping[str, Callable[[Batches], Any]] = {
    "input_ids": lambda b: b._ids(),
    "qformer_input_ids": lambda b: b._ids(),
    "bbox": lambda b: b._below(8, BATCH, SEQUENCE, 2).sort(2).values.repeat(1, 1, 2),
    "pixel_values": Batches.pixels,
    "image_grid_thw": lambda b: torch.tensor([[1, GRID, GRID]] * BATCH),
    "pixel_values_videos": lambda b: b._randn(BATCH, getattr(b.config, "frames_per_clip", 2), 3, IMAGE, IMAGE),
    "input_values": Batches.waves,
    "input_features": Batches.spectrograms,
    "input_features_mask": lambda b: torch.ones(b.spectrograms().shape[0], FRAMES, dtype=torch.long),
    "past_values": Batches.past,
    "past_time_features": lambda b: b.time_features(b.past()),
    "past_observed_mask": lambda b: torch.ones_like(b.past()),
    "future_time_features": lambda b: b.time_features(b.future()),
    "visual_feats": lambda b: b._randn(BATCH, 4, b.config.visual_feat_dim),
    "visual_pos": lambda b: b._randn(BATCH, 4, b.config.visual_pos_dim),
}


TURNED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pixel_values": lambda pixels: pixels.unsqueeze(1),
    "input_features": lambda features: features.transpose(1, 2).contiguous(),
}


# ---- labels ----------------------------------------------------------------------------------------


def _text(b: Batches, inputs: Batch) -> Iterator[Batch]:
    """Labels that are not the inputs, some ignored, unevenly over the batch, and in one sequence all."""
    length = SEQUENCE // 2 if b.config.is_encoder_decoder else inputs["input_ids"].shape[1]
    labels = b._ids(length)
    labels[: BATCH // 2, length // 2 :] = IGNORED
    labels[0] = IGNORED
    yield {"labels": labels}


def _classes(b: Batches, inputs: Batch) -> Iterator[Batch]:
    yield {"labels": b._below(min(CLASSES, b.config.num_labels), BATCH)}


def _tokens(b: Batches, inputs: Batch) -> Iterator[Batch]:
    yield {"labels": b._below(b.config.num_labels, BATCH, SEQUENCE)}


def _span(b: Batches, inputs: Batch) -> Iterator[Batch]:
    yield {"start_positions": b._below(SEQUENCE, BATCH), "end_positions": b._below(SEQUENCE, BATCH)}


def _choice(b: Batches, inputs: Batch) -> Iterator[Batch]:
    twice = {name: value[:, None].repeat(1, 2, *[1] * (value.dim() - 1)) for name, value in inputs.items()}
    yield {**twice, "labels": b._below(2, BATCH)}


def _pixels(b: Batches, inputs: Batch) -> Iterator[Batch]:
    labels = b._below(b.config.num_labels, BATCH, *inputs["pixel_values"].shape[-2:])
    labels[0] = 255
    yield {"labels": labels}


def _masks(b: Batches, inputs: Batch) -> Iterator[Batch]:
    size = inputs["pixel_values"].shape[-2:]
    yield {
        "mask_labels": [(b._below(2, 2, *size)).to(b.dtype) for _ in range(BATCH)],
        "class_labels": [b._below(b.config.num_labels, 2) for _ in range(BATCH)],
    }


def _boxes(b: Batches, inputs: Batch) -> Iterator[Batch]:
    def boxes() -> torch.Tensor:
        return (0.2 + 0.3 * torch.rand(2, 4, generator=b.generator, dtype=torch.float64)).to(b.dtype)

    yield {"labels": [{"class_labels": b._below(b.config.num_labels, 2), "boxes": boxes()} for _ in range(BATCH)]}


def _transcript(b: Batches, inputs: Batch) -> Iterator[Batch]:
    yield {"labels": torch.randint(3, TOKENS, (BATCH, 4), generator=b.generator)}


def _masked_image(b: Batches, inputs: Batch) -> Iterator[Batch]:
    vision = b.config
    patches = (inputs["pixel_values"].shape[-1] // vision.patch_size) ** 2
    yield {"bool_masked_pos": b._below(2, BATCH, patches).bool()}


def _series(b: Batches, inputs: Batch) -> Iterator[Batch]:
    yield {"future_values": b.future()}
    yield {"target_values": b._randn(BATCH, getattr(b.config, "num_targets", 1))}
    yield {"target_values": b._below(2, BATCH)}


def _answers(b: Batches, inputs: Batch) -> Iterator[Batch]:
    yield {"labels": b._randn(BATCH, b.config.num_labels).sigmoid()}


LABELS: Mapping[str, Callable[[Batches, Batch], Iterator[Batch]]] = {
    "text": _text,
    "image and text": _text,
    "speech to text": _text,
    "sequence": _classes,
    "image": _classes,
    "video": _classes,
    "audio": _classes,
    "tokens": _tokens,
    "span": _span,
    "choice": _choice,
    "pixels": _pixels,
    "masks": _masks,
    "boxes": _boxes,
    "ctc": _transcript,
    "masked image": _masked_image,
    "series": _series,
    "image and question": _answers,
    "pairs": lambda b, inputs: iter([{}]),
}
