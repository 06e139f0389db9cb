"""What a machine may lack; a test that needs it is skipped there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def data_folder(*parts: str) -> Path:
    """The folder of the text and question sets, which has these parts: `books`, `qasper`, …"""
    folder = Path(os.environ.get("LONGFOCUS_DATA") or Path(__file__).resolve().parents[2] / "shared/data")
    for part in parts:
        if not (folder / part).exists():
            pytest.skip(f"{folder / part} is not here")
    return folder


def mount(folder: Path, kib: int) -> None:
    """A new file system of so many KiB in a new folder; whoever mounts it unmounts it."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")


def grow(disk: Path, kib: int) -> None:
    """Give a mounted file system so many KiB."""
    subprocess.run(["mount", "-o", f"remount,size={kib}k", disk], check=True)
