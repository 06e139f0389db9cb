"""docs/cli.md is what the command line says of itself.

python -m pytest tests/test_cli_page.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_command_line_page_is_fresh() -> None:
    script = Path(__file__).resolve().parents[1] / "docs/make_cli_page.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
