#!/usr/bin/env bash
# Sets everything up, then lints, checks types, builds the docs and runs all tests; fails if any of them does. Arguments go
# to pytest, which runs as three processes for two cores: some wait, for links and clocks; those that start ranks start
# them themselves. Files begin by tests/durations.json, the longest first: `--record-durations` writes it anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.ci/setup
bin=$PWD/.venv/bin
failed=""
unset PYTHONDONTWRITEBYTECODE  # tests start some thirty interpreters, and each would compile the package again

mkdir -p build
echo "== ruff"
"$bin/ruff" check . || failed+=" ruff"

# The docs are built and types are checked beside the tests, which would leave a core idle now and then.
NO_MKDOCS_2_WARNING=1 "$bin/python" -m mkdocs build --strict --quiet > build/mkdocs.log 2>&1 & docs=$!

# The three folders are one package; mypy and import-linter see it only where they lie as one.
rm -rf build/typing
mkdir -p build/typing/autopar
ln -s "$PWD"/autopar/* "$PWD/passes" "$PWD/runtime" build/typing/autopar/

echo "== imports"
(cd build/typing && exec "$bin/lint-imports" --no-logo --no-cache ../../pyproject.toml) > build/imports.log 2>&1 ||
    { cat build/imports.log; failed+=" imports"; }

(cd build/typing && exec "$bin/mypy" --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p autopar) \
    > build/mypy.log 2>&1 & mypy=$!
trap 'kill "$docs" "$mypy" 2> /dev/null || true' EXIT

echo "== pytest"
"$bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || failed+=" pytest"

echo "== docs"
wait "$docs" || failed+=" docs"
cat build/mkdocs.log

echo "== mypy"
wait "$mypy" || failed+=" mypy"
cat build/mypy.log

if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
echo "all passed"
