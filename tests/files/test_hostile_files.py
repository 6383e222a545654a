"""Damaged and hostile files: each either loads, or is one ValueError that names the file and says what to do."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measured import CLUSTER, PROGRAM, ROW, measurements
from models import case
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cluster.calibration import fit
from autopar.cluster.library.read import read_cluster
from autopar.cluster.library.write import cluster_toml
from autopar.cluster.measurements import Measurements
from autopar.planning.constraints import pins
from autopar.planning.plan import Plan
from autopar.planning.planner import Planner
from autopar.planning.request import check_constraints
from autopar.profile.database import TABLES, CollectiveRow, Profiles
from autopar.report.simulation import HOST_MARKS, merged
from autopar.runtime.load import INDEX, opened
from autopar.runtime.load import _read as read_tensor

COLLECTIVE = CollectiveRow(machine="one", links="l", kind="all_reduce", bytes=1024, seconds=1e-3, runs=3)

REMEDY = re.compile(r"\b(give|write|correct|remove|make|move|measure|run again|save)\b")

quickly = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def loads_or_says_why(read: Callable[[], object], file: Path) -> None:
    try:
        read()
    except ValueError as error:
        message = str(error)
        assert str(file) in message and REMEDY.search(message), f"{type(error).__name__}: {message}"
        assert len(message) < 2000


# --- what happens to files

HOSTILE = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 10**10, 2**63, 10**400, 1.5, -0.0, 1e308, 5e-324, float("inf"), float("nan")),
        *("", "x", "R", "S(0)", "1", "\x00", "\ud800", "x" * 5000, [], {}, [[]], [{}], {"": []}, [1, 2], ["R", "R"]),
    ]
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in JSON, as a container and a key."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def edited(data: Any, draw: Callable[..., Any]) -> str:
    """JSON of which one to three parts are others, missing, or too many."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(data)) or [([0], 0)]
        container, key = found[draw(st.integers(0, len(found) - 1))]
        what = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
        if what == "replace":
            container[key] = copy.deepcopy(draw(HOSTILE))
        elif what == "remove":
            del container[key]
        elif isinstance(container, dict):
            container[draw(st.sampled_from(["", "format", "surprise"]))] = copy.deepcopy(draw(HOSTILE))
        else:
            container.append(copy.deepcopy(draw(HOSTILE)))
    return json.dumps(data)


def damaged(content: bytes, draw: Callable[..., Any]) -> bytes:
    """A file that is cut, overwritten somewhere, or another."""
    what = draw(st.sampled_from(["cut", "overwritten", "another"]))
    if what == "another":
        return bytes(draw(st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000, b""])))
    place = draw(st.integers(0, len(content)))
    if what == "cut":
        return content[:place]
    noise = draw(st.binary(min_size=1, max_size=64))
    return content[:place] + noise + content[place + len(noise) :]


# --- readers


@pytest.fixture(scope="module")
def planner() -> Planner:
    made = case("gpt2")
    return Planner(made.model, {"a": 2, "b": 2}, made.args, made.kwargs, loss_fn=made.loss_fn)


@pytest.fixture(scope="module")
def saved_plan(planner: Planner) -> dict[str, Any]:
    saved: dict[str, Any] = json.loads(json.dumps(planner.plan(solver="ddp").to_json()))
    return saved


@quickly
@given(data=st.data())
def test_plans(data: st.DataObject, planner: Planner, saved_plan: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = edited(saved_plan, data.draw).encode()
    file.write_bytes(text if data.draw(st.booleans()) else damaged(text, data.draw))
    loads_or_says_why(lambda: shown(Plan.load(file)), file)
    with contextlib.suppress(ValueError):  # of another model, say
        planner.assignment(Plan.load(file))


def shown(plan: Plan) -> None:
    assert str(plan) and plan.digest and Plan.from_json(plan.to_json()).digest == plan.digest


@functools.cache
def good_cluster() -> str:
    return cluster_toml(fit(measurements(CLUSTER), "ours"), "measured", "heading")


@quickly
@given(data=st.data())
def test_clusters(data: st.DataObject, tmp_path: Path) -> None:
    text = good_cluster()
    values = list(re.finditer(r"= ?(.*)$", text, re.MULTILINE))
    for _ in range(data.draw(st.integers(0, 2))):
        found = data.draw(st.sampled_from(values))
        hostile = data.draw(
            st.sampled_from(
                [
                    *(
                        "0",
                        "-1",
                        "1e400",
                        "nan",
                        "inf",
                        '""',
                        '"ring"',
                        "true",
                        "[]",
                        "{}",
                        "[[]]",
                        "[{}]",
                        "1979-05-27",
                    ),
                    *(
                        "1e-320",
                        "10000000000",
                        "1" * 5000,
                        "[" * 3000,
                        '[["ring"]]',
                        "{ all_reduce = [] }",
                        "{ a = 1 }",
                    ),
                    *("[[1, 0.5], [1, 0.5]]", "[[0, 1], [1, 0]]", "1" + "0" * 400),
                ]
            )
        )
        text = text.replace(found[0], f"= {hostile}", 1)
    file = tmp_path / "ours.toml"
    file.write_bytes(damaged(text.encode(), data.draw) if data.draw(st.booleans()) else text.encode())
    loads_or_says_why(lambda: str(read_cluster(file)), file)


@functools.cache
def good_measurements() -> Any:
    return json.loads(json.dumps(measurements(CLUSTER).to_json()))


@quickly
@given(data=st.data())
def test_measurements(data: st.DataObject, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    text = edited(good_measurements(), data.draw).encode()
    file.write_bytes(text if data.draw(st.booleans()) else damaged(text, data.draw))
    loads_or_says_why(lambda: fit(Measurements.load(file), "ours"), file)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Profiles:
    return Profiles(tmp_path_factory.mktemp("profiles") / "other.sqlite")


@pytest.fixture(scope="module")
def good_database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("profiles") / "profiles.sqlite"
    Profiles(path).add([ROW, PROGRAM, COLLECTIVE])
    return path.read_bytes()


def used(path: Path, other: Profiles) -> None:
    """Everything that reads a database."""
    profiles = Profiles(path)
    for table in TABLES:
        profiles.rows(table)
    profiles.machines()
    other.read(profiles.export())
    profiles.add([ROW])
    profiles.prune(machine="one")


FIGURES = ("'x'", "''", "-1", "x'ff'", "9e999", "1.5", "9223372036854775807", "CAST(x'ff' AS TEXT)")


@quickly
@given(data=st.data())
def test_profile_databases(data: st.DataObject, good_database: bytes, other: Profiles, tmp_path: Path) -> None:
    for before in tmp_path.iterdir():
        before.unlink()
    path = tmp_path / "profiles.sqlite"
    if data.draw(st.booleans()):
        path.write_bytes(damaged(good_database, data.draw))
    else:
        path.write_bytes(good_database)
        table = data.draw(st.sampled_from(list(TABLES)))
        column = data.draw(st.sampled_from([f.name for f in fields(TABLES[table][0])]))
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE {table} SET {column} = {data.draw(st.sampled_from(FIGURES))}")
    loads_or_says_why(lambda: used(path, other), path)


@quickly
@given(data=st.data())
def test_exported_profiles(data: st.DataObject, tmp_path: Path) -> None:
    tables = {"operators": [ROW], "collectives": [COLLECTIVE], "programs": [PROGRAM]}
    good = {"application": "autopar profiles", "version": 1, **{n: [asdict(r) for r in v] for n, v in tables.items()}}
    text = edited(good, data.draw)
    damage = damaged(text.encode(), data.draw).decode(errors="replace") if data.draw(st.booleans()) else text
    profiles = Profiles(tmp_path / "profiles.sqlite")
    try:
        profiles.read(damage)
    except ValueError as error:
        assert "not what autopar profiles export wrote" in str(error) and REMEDY.search(str(error))
    for table in TABLES:
        profiles.rows(table)


@functools.cache
def simulated() -> tuple[Any, Any]:
    """A timeline, and a trace of its step as a profiler exports it."""
    made = torch.nn.Linear(4, 4)
    timeline = autopar.simulate(made, {"a": 2}, (torch.ones(2, 4),), loss_fn=torch.mean, solver="ddp").timeline
    marks = [
        {"ph": "X", "cat": HOST_MARKS, "name": event.label, "ts": 1e6 * event.start_seconds, "dur": 1.0}
        for event in timeline.events
    ]
    return timeline, {"schemaVersion": 1, "traceEvents": [*marks, {"ph": "M", "name": "process_name", "pid": 1}]}


@quickly
@given(data=st.data())
def test_traces(data: st.DataObject, tmp_path: Path) -> None:
    timeline, good = simulated()
    file = tmp_path / "trace.json"
    text = edited(good, data.draw).encode()
    file.write_bytes(text if data.draw(st.booleans()) else damaged(text, data.draw))
    loads_or_says_why(lambda: json.dumps(merged(timeline, file)), file)


@functools.cache
def weights() -> dict[str, bytes]:
    """Files of a directory of weights: two shards and their index."""
    save = pytest.importorskip("safetensors.torch").save
    tensors = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.int64), "c": torch.tensor(1.5)}
    shards = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b", "c"]}
    files = {name: save({tensor: tensors[tensor] for tensor in held}) for name, held in shards.items()}
    index = {"metadata": {"total_size": 68}, "weight_map": {t: name for name, held in shards.items() for t in held}}
    return {**files, INDEX: json.dumps(index).encode()}


@quickly
@given(data=st.data())
def test_weights(data: st.DataObject, tmp_path: Path) -> None:
    for before in tmp_path.iterdir():
        before.unlink()
    files = dict(weights())
    worse = data.draw(st.sampled_from([*files]))
    if data.draw(st.booleans()):
        files[worse] = damaged(files[worse], data.draw)
    elif worse == INDEX:
        files[worse] = edited(json.loads(files[worse]), data.draw).encode()
    else:
        length = int.from_bytes(files[worse][:8], "little")
        header = edited(json.loads(files[worse][8 : 8 + length]), data.draw).encode()
        files[worse] = len(header).to_bytes(8, "little") + header + files[worse][8 + length :]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    loads_or_says_why(lambda: read_all(tmp_path), tmp_path)


def read_all(folder: Path) -> None:
    reader = opened(folder)
    for name, stored in reader.stored.items():
        if stored.shape and math.prod(stored.shape) > 1000:
            continue  # the model's shape is another, which is said before memory is taken
        held = torch.empty(stored.shape, dtype=stored.dtype)
        read_tensor(reader, name, [((0,) * held.dim(), tuple(held.shape), held)])


@quickly
@given(
    constraints=st.recursive(
        HOSTILE | st.text(max_size=8),
        lambda inner: st.dictionaries(
            st.sampled_from(["a", "b", "c", "*", "[", "transformer.*", "input_ids", "lm_head.weight"])
            | st.text(max_size=3),
            inner | st.sampled_from(["R", "S(0)", "S(1)", "S(7)", "S(-1)", "P"]),
            max_size=3,
        ),
        max_leaves=6,
    )
)
def test_constraints(constraints: Any, planner: Planner) -> None:
    try:
        check_constraints(constraints)
        pins(planner.space, constraints or {})
    except ValueError as error:
        assert "constraint" in str(error)


# --- what is no file to read


def trace(path: Path) -> object:
    return merged(simulated()[0], path)


@pytest.mark.parametrize("read", [Plan.load, read_cluster, Measurements.load, Profiles, autopar.Plan.load, trace])
def test_a_folder(read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(tmp_path)) + r".*give"):
        read(tmp_path)


@pytest.mark.parametrize("read", [Plan.load, read_cluster, Measurements.load, trace])
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"a = " + b"[" * 100_000, b"\xff\xfe\x00"], ids=("json", "toml", "bytes")
)
def test_nests_and_bytes(read: Callable[[Path], object], content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    loads_or_says_why(lambda: read(file), file)
    with pytest.raises(ValueError):
        read(file)


# --- the command line


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["calibrate", "--read", "FOLDER", "--out", "FOLDER/new.toml"], "cannot be read (Is a directory)"),
        (["calibrate", "--read", "deep.json", "--save", "FOLDER/new.json"], "its JSON is nested too deep"),
        (["calibrate", "--read", "good.json", "--out", "FOLDER"], "--out is FOLDER, a folder: give the path of a file"),
        (["calibrate", "--read", "good.json", "--save", "FOLDER"], "--save is FOLDER, a folder: give the path of a"),
        (["calibrate", "--read", "good.json", "--out", "no/x.toml"], "there is no folder no: create it"),
        (["profiles", "export", "FOLDER", "--profiles", "db"], "FILE is FOLDER, a folder: give the path of a file"),
        (["profiles", "import", "FOLDER", "--profiles", "db"], "FOLDER: cannot be read (Is a directory); give"),
        (["profiles", "import", "bytes", "--profiles", "db"], "bytes: is no text in UTF-8"),
        (["plan", "hf:LlamaConfig", "--mesh", "a=2", "--set", "x=" + "[" * 100_000], "--set x is a JSON value that"),
    ],
)
def test_commands(command: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FOLDER").mkdir()
    Path("deep.json").write_text("[" * 100_000)
    Path("good.json").write_text(json.dumps(good_measurements()))
    Path("bytes").write_bytes(b"\xff\xfe\x00")
    Profiles(Path("db")).add([ROW])
    ended = CliRunner().invoke(app, command)
    assert ended.exit_code == 2 and message in " ".join(ended.stderr.split()), ended.stderr
    assert not [*Path("FOLDER").iterdir()]
