#!/usr/bin/env bash
# Build the wheel, install it in an empty environment, and run a small experiment from an empty folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/.venv/bin/python" -m build --wheel --outdir "$work/dist" "$root" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$root/constraints.txt" "$work"/dist/*.whl
mkdir "$work/elsewhere"
cd "$work/elsewhere"
"$work/venv/bin/caramba" compile model=llama32_dba train=blockwise --print-plan
"$work/venv/bin/caramba" experiment=smoke --quiet
ls runs/*/*/artifacts/report.json runs/*/*/artifacts/report.html runs/*/*/artifacts/tables.tex runs/*/*/artifacts/summary.png
