#!/usr/bin/env bash
# Trains examples/train_llama.py on 4 ranks of this machine, in the active environment or .venv if autopar and
# transformers are installed there; otherwise sets up .venv before. Arguments go to the example (--help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

has_both() {  # -I: what is installed, and not the folder autopar/ of this clone
    "$1" -I -c 'from importlib.util import find_spec as found; exit(not (found("autopar") and found("transformers")))' \
        2> /dev/null
}

environment=${VIRTUAL_ENV:-.venv}
python=$environment/bin/python
if [ -e "$environment/installed" ] || ! has_both "$python"; then  # .ci/setup made it, and sees that it is up to date
    .ci/setup hf
    python=.venv/bin/python
fi
export OMP_NUM_THREADS=1
exec "$python" -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_llama.py "$@"
