#!/usr/bin/env bash
# Sets everything up, then trains examples/train_llama.py on 4 ranks of this machine. Arguments go to it (--help).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.ci/setup hf
export OMP_NUM_THREADS=1
exec .venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_llama.py "$@"
