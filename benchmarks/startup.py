"""CPU time of `longfocus --help`, beside `python -c pass`: the median of pairs taken in turns.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys

PAIRS = 11


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    python = sys.executable
    pairs = [
        (cpu_seconds([python, "-m", "longfocus.cli", "--help"]), cpu_seconds([python, "-c", "pass"]))
        for _ in range(PAIRS + 1)
    ][1:]
    more = statistics.median(ours - bare for ours, bare in pairs)
    print(json.dumps({"help_cpu_seconds_more_than_python": round(more, 3), "pairs": PAIRS}))


if __name__ == "__main__":
    main()
