"""One rank of `autopar.lab.run`: python -m autopar.lab.rank CALL RESULT, both files of JSON."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch.distributed as dist


def main() -> None:
    call, result = map(Path, sys.argv[1:])
    asked = json.loads(call.read_text())
    function = getattr(_module(asked), asked["function"])
    dist.init_process_group("gloo")
    value = function(*asked["arguments"])
    dist.destroy_process_group()
    result.write_text(json.dumps(value))


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
