"""Models that load and answer, but whose weights are no numbers.

python -m pytest tests/model/test_load.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import longfocus
from longfocus.errors import ModelNotFoundError
from longfocus.subjects.open import open_local
from tests.models import tiny

UP = "model.layers.2.mlp.up_proj.weight"


def _saved(folder: Path, number: float, *names: str) -> Path:
    model = tiny("llama")
    with torch.no_grad():
        for name in names:
            model.get_parameter(name).view(-1)[-1] = number
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", [UP, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, name: str, number: float) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"{name}\. The file is damaged, or its training went astray\.$"):
        longfocus.load(_saved(tmp_path, number, name))


def test_several_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"in model\.norm\.weight and 1 more") as caught:
        longfocus.load(_saved(tmp_path, float("nan"), "model.norm.weight", "lm_head.weight"))
    assert "\n" not in str(caught.value)


def test_numbers_beyond_a_narrow_dtype_are_refused_in_it_only(tmp_path: Path) -> None:
    folder = _saved(tmp_path, 1e6, UP)
    with pytest.raises(ModelNotFoundError, match="wider dtype than float16"):
        longfocus.load(folder, dtype="float16")
    assert longfocus.load(folder, dtype="bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("plain", [False, True])
def test_evaluation_refuses_them_too(tmp_path: Path, plain: bool) -> None:
    with pytest.raises(ModelNotFoundError, match="nan or infinite numbers"):
        open_local(str(_saved(tmp_path, float("nan"), UP)), plain=plain)


def test_an_adapter_with_such_weights_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = _saved(tmp_path / "base", 1.0, UP)
    adapted = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with torch.no_grad():
        next(w for name, w in adapted.named_parameters() if "lora_B" in name).fill_(float("nan"))
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "longfocus.json").write_text(f'{{"base": "{base}"}}')
    with pytest.raises(ModelNotFoundError, match=r"adapter: nan or infinite numbers in .*q_proj"):
        longfocus.load(tmp_path / "adapter")
