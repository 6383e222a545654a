"""One rank of `autopar.extras.lab.run`: python -m autopar.extras.lab.rank CALL RESULT, both files of JSON."""

import gc
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch.distributed as dist


def main() -> None:
    call, result = map(Path, sys.argv[1:])
    asked = json.loads(call.read_text())
    function = getattr(_module(asked), asked["function"])
    dist.init_process_group("gloo")
    try:
        value = function(*asked["arguments"])
        dist.destroy_process_group()
    except Exception:
        _fail()
    gc.collect()  # groups that modules hold end with their threads, and not with the interpreter
    result.write_text(json.dumps(value))


def _fail() -> NoReturn:
    """Ends the process with the traceback of the error at hand.

    Not by way of the interpreter's end: tensors of collectives that are under way are freed in gloo's threads, which
    then ask for an interpreter that is ending, so that the process aborts (pytorch/pytorch#179291) and the error seems
    to be a SIGABRT.
    """
    traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _module(asked: Mapping[str, str]) -> ModuleType:
    if "module" in asked:
        return importlib.import_module(asked["module"])
    path = Path(asked["file"])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
