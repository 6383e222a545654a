"""Plans and programs are as `tests/golden/` records them (see `golden.py`), and what differs is said in words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

import golden  # noqa: E402
from golden_text import differences  # noqa: E402

from autopar.ir.text import parsed_graph, parsed_program, text_of  # noqa: E402

RECORDED = """\
gpt2 on mesh a=2, b=2 of dgx-h100, by dp

[plan]
seconds: 0.5
bytes: 1000

[decisions of h.*, copies 0 to 2]
# h.0.attn
mm: S0%64 R
# h.0
add: R R

[forward]
# h.0.attn
mm = aten.mm.default(x, w): float32[4, 8]
all_reduce = collective.all_reduce(mm, 'sum', a): float32[4, 8]
# h.0
add = aten.add.Tensor(all_reduce, x): float32[4, 8]
"""


def same_versions() -> bool:
    installed = {"torch": torch.__version__, "transformers": transformers.__version__}
    return all(installed[name].startswith(f"{version}.") for name, version in golden.VERSIONS.items())


@pytest.mark.parametrize("model", golden.MODELS)
def test_plans_and_programs_are_as_recorded(model: str) -> None:
    if not same_versions():
        pytest.skip(f"recorded with {golden.VERSIONS}: other versions may capture another graph")
    quick = [g for g in golden.GOLDENS.values() if g.model == model and g.is_quick]
    told = [sentence for g in quick for sentence in g.differences()]
    assert not told, "\n".join([f"{len(told)} differences:", *told])


@pytest.mark.parametrize("model", golden.MODELS)
def test_their_texts_parse_back(model: str) -> None:
    """Graphs and programs are printed, parsed and equal, with everything that their instructions say of themselves; and
    what a plan says was rewritten makes its program of the one before."""
    graph = golden.captured(model).captured.graph
    assert parsed_graph(text_of(graph)) == graph
    quick = [g for g in golden.GOLDENS.values() if g.model == model and g.is_quick]
    for g in (g for g in quick if "[no plan]" not in g.path.read_text()):
        plan, program = golden.planned(g)
        if g.mesh == "2x2":
            assert golden.planner(model, g.mesh).program(plan, plan.rewrites) == program
        text = text_of(program)
        assert parsed_program(text) == program
        assert text_of(parsed_program(text)) == text, "1, 1.0 and True are equal, and are not the same"


def test_every_file_is_of_a_golden_plan_and_every_plan_has_one() -> None:
    assert {path.name for path in golden.FOLDER.iterdir()} == {g.path.name for g in golden.GOLDENS.values()}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "mm: S0%64 R",
            "mm: R S1%8",
            "[decisions of h.*, copies 0 to 2] mm (h.0.attn) was S0%64 R and is R S1%8",
        ),
        ("seconds: 0.5", "seconds: 0.625", "[plan] seconds was 0.5 and is 0.625 (+25%)"),
        ("add: R R\n", "", "[decisions of h.*, copies 0 to 2] add (h.0) is gone; it was R R"),
        ("bytes: 1000", "bytes: 1000\ndigest: f00", "[plan] digest is new: f00"),
        (
            "all_reduce(mm, 'sum', a)",
            "all_reduce(mm, 'sum', b)",
            "[forward] line 3, in h.0.attn, the first that differs, was `all_reduce = collective.all_reduce(mm, 'sum', "
            "a): float32[4, 8]` and is `all_reduce = collective.all_reduce(mm, 'sum', b): float32[4, 8]`",
        ),
        ("copies 0 to 2]", "copies 0 to 1]", "[decisions of h.*, copies 0 to 2] is gone"),
    ],
)
def test_a_change_is_said_in_words(old: str, new: str, sentence: str) -> None:
    changed = RECORDED.replace(old, new)
    assert changed != RECORDED
    assert sentence in differences(RECORDED, changed)


def test_texts_that_are_equal_differ_in_nothing() -> None:
    assert differences(RECORDED, RECORDED) == []


def test_many_changes_are_counted() -> None:
    changed = "\n".join(["[decisions of h.*, copies 0 to 2]", *(f"site_{i}: R" for i in range(100))])
    assert len(differences(RECORDED, changed)) < 20
    assert any(told.startswith("and 9") for told in differences(RECORDED, changed))


def test_a_changed_decision_of_a_real_file_is_named_with_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model, the mesh and the solver; the parameter, from what to what."""
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    monkeypatch.setattr(golden, "ROOT", tmp_path)
    recorded = golden.GOLDENS["gpt2-2x2-ddp"]
    text = recorded.text()
    weight = "transformer.wte.weight: at rest R R, in use R R, keep"
    assert weight in text
    recorded.path.write_text(text.replace(weight, weight.replace("at rest R R", "at rest S(0) R")))
    assert recorded.differences() == [
        "gpt2 on mesh a=2, b=2 of dgx-h100, by ddp: [parameters] transformer.wte.weight was at rest S(0) R, "
        "in use R R, keep and is at rest R R, in use R R, keep"
    ]
