"""The sweep over the architectures of `transformers`: what it makes small, and how it goes on where it stopped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transformers as hf

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import architectures  # noqa: E402
import tiny  # noqa: E402


@pytest.mark.parametrize("of", ["Llama", "CLIP", "T5", "Swin", "Gemma3Text", "Whisper"])
def test_a_configuration_is_small_in_all_its_parts(of: str) -> None:
    small = tiny.Shrinking(rules=tiny.SCALES[0]).config(getattr(hf, f"{of}Config")())
    for config in (small, *(getattr(small, name) for name in small.sub_configs)):
        sizes = {name: value for name, value in vars(config).items() if type(value) is int}
        for name in ("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"):
            assert sizes.get(name, 2) == 2, name
        for name in ("hidden_size", "d_model", "intermediate_size", "d_ff", "vocab_size"):
            assert sizes.get(name, 0) <= 128, f"{name} is {sizes[name]}"
        assert not any(value for name, value in vars(config).items() if "drop" in name and isinstance(value, float))


def test_a_layer_of_each_kind_is_kept() -> None:
    small = tiny.Shrinking(rules=tiny.SCALES[0]).config(hf.Gemma3TextConfig())
    assert small.layer_types == ["sliding_attention", "full_attention"] and small.num_hidden_layers == 2


def test_every_type_has_its_preferred_class_first() -> None:
    found = {a.name: a for a in tiny.architectures()}
    assert len(found) > 400
    assert [found[n].classes[0] for n in ("llama", "bert", "vit", "wav2vec2")] == [
        ("LlamaForCausalLM", "text"),
        ("BertForMaskedLM", "text"),
        ("ViTForImageClassification", "image"),
        ("Wav2Vec2ForCTC", "ctc"),
    ]


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    architectures.main(["--rows", str(file), "--until", "eager", "--only", "gpt2"])
    (first,) = architectures.read(file).values()
    assert first["outcome"] == "trains in eager"
    assert (first["class"], first["dtype"], first["random"]) == ("GPT2LMHeadModel", "float64", False)
    capsys.readouterr()

    # the second has 1177 operators, and too little time
    architectures.main(["--rows", str(file), "--resume", "--timeout", "2", "--only", "gpt2", "longt5"])
    printed, rows = capsys.readouterr().out, architectures.read(file)
    assert "1/1 longt5" in printed and "2 architectures" in printed
    assert rows["gpt2"] == first and rows["longt5"]["outcome"].endswith("in time")
