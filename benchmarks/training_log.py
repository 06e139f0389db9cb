"""A run's log as a picture: loss, the first window against later ones, attention mass by memory layer.

python benchmarks/training_log.py out/smollm2-135m --out docs/measured/training.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import common


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of `longfocus train`, or a log.jsonl")
    parser.add_argument("--out", type=Path, default=Path("out/training.png"))
    arguments = parser.parse_args()
    file = arguments.run / "log.jsonl" if arguments.run.is_dir() else arguments.run
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    lines = [line for line in lines if "loss" in line]
    made, axes, pyplot = common.figure(3)
    names = sorted({name for line in lines for name in line}, key=lambda name: (len(name), name))
    panels = (
        ("Loss, all rows", ["loss"]),
        ("Positive attention mass, by layer", [name for name in names if name.startswith("positive_mass_")]),
        ("Attention outside the window, by layer", [name for name in names if name.startswith("additional_mass_")]),
    )
    for axis, (title, fields) in zip(axes, panels, strict=True):
        for field in fields:
            points = [(line["tokens"], line[field]) for line in lines if field in line]
            axis.plot(*zip(*points, strict=True), label=field.rpartition("_")[2] if "mass" in field else None)
        axis.set(title=title, xlabel="tokens trained")
        axis.grid(alpha=0.3)
        if len(fields) > 1:
            axis.legend(title="layer", fontsize=9)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    made.savefig(arguments.out, dpi=110)
    pyplot.close(made)
    print(json.dumps({"out": str(arguments.out), "steps": lines[-1]["step"], "tokens": lines[-1]["tokens"]}))


if __name__ == "__main__":
    main()
