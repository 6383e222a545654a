#!/usr/bin/env bash
# Tests another version of PyTorch than the pinned one, which is all that CI has: tests/versions.sh 2.11.0 [arguments for
# pytest]. Makes .venv-2.11.0, with that version and all else as pinned, checks types against its sources, which finds
# private names that it lacks, and runs the tests of what versions differ in. Arguments take the place of these tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:?a version of PyTorch, such as 2.11.0}
shift
.ci/setup
bin=$PWD/.venv-$version/bin

if [ ! -e ".venv-$version/installed" ]; then
    .venv/bin/python -m venv --clear ".venv-$version"
    pins=$(mktemp)
    trap 'rm -f "$pins"' EXIT
    grep -vE '^(torch|triton)==' constraints.txt > "$pins"
    tools=$(.venv/bin/python -c 'import tomllib; tools = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*(t for t in tools["optional-dependencies"]["dev"] if not t.startswith("torch==")))')
    # shellcheck disable=SC2086  # a word each
    "$bin/python" -m pip install --quiet --constraint "$pins" "torch==$version" $tools --editable .
    touch ".venv-$version/installed"
fi

if [ $# -eq 0 ]; then
    for subject in attention bucket capture checkpoints devices gathered handshake masks optimizers parity regions runtime \
        state; do
        set -- "$@" tests/*/"test_$subject.py"
    done
fi

rm -rf build/typing
mkdir -p build/typing/autopar
ln -s "$PWD"/autopar/* "$PWD/passes" "$PWD/runtime" build/typing/autopar/
(cd build/typing && "$bin/mypy" --config-file ../../pyproject.toml --cache-dir "../../.mypy_cache-$version" -p autopar)
"$bin/python" -m pytest -n 2 "$@"
