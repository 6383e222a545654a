#!/usr/bin/env bash
# Sets everything up, then lints, checks types and runs all tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.ci/setup
bin=$PWD/.venv/bin

echo "== ruff"
"$bin/ruff" check .

echo "== mypy"
# The three folders are one package, which mypy sees only if they lie as one.
rm -rf build/typing
mkdir -p build/typing/autopar
ln -s "$PWD"/autopar/* "$PWD/passes" "$PWD/runtime" build/typing/autopar/
(cd build/typing && "$bin/mypy" --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p autopar)

echo "== pytest"
"$bin/python" -m pytest "$@"
