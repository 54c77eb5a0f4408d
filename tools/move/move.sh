#!/usr/bin/env bash
# The coming layout as a script: `tools/move/move.sh CHECKOUT`, in a clean clone that has `make setup-dev` behind it. Goes with the move.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
cd "$1"
bin="$here/../../.venv/bin"
python3 "$here/move_rooms.py" .
find . -type d -empty -not -path "./.git/*" -not -path "./.venv/*" -delete
"$bin/ruff" check -q --fix . > /dev/null 2>&1 || true
"$bin/ruff" format -q .
{ "$bin/ruff" check . --output-format concise || true; } | { grep E501 || true; } | cut -d: -f1 | sort -u | xargs -r python3 "$here/wrap.py" 140
python3 "$here/after.py"
"$bin/ruff" format -q .
"$bin/ruff" check .
