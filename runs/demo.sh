#!/usr/bin/env bash
# The whole path on real input: ask a question of a real repository, the source code of an installed package.
# On 2 cores: about a minute of reading for some 43,000 tokens, after 30 s of converting the model the first time.
set -euo pipefail
bin=${BIN:-.venv/bin}
repository=$("$bin/python" -c "import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec('tqdm').origin).parent)")
question=${1:-How does tqdm estimate the remaining time?}
echo "longfocus ask <the source folder of tqdm> \"$question\""
exec "$bin/longfocus" ask "$repository" "$question"
