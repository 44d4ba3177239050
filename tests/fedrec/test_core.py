# SPDX-License-Identifier: Apache-2.0
"""Configuration, errors, packages, random streams and graphs."""

import ast
import math
import os
import pickle
import re
import subprocess
import sys
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import Field, model_validator

import fedrec
from fedrec import errors
from fedrec.config import Config
from fedrec.errors import NEIGHBOURS, ROOT, ExperimentError, FedrecError
from fedrec.graphs import NOTHING, ThirdParty, attended, tokens
from fedrec.rng import seed_sequence, stream, torch_stream

# Configuration: errors give the full key, what was expected, and how to fix it.


class Inner(Config):
    step_size: float = Field(default=0.1, gt=0, lt=1)
    """How far one step goes, in (0, 1)."""
    mode: Literal["fast", "exact"] = "fast"


class Outer(Config):
    rounds: int = Field(ge=1)
    """Number of rounds."""
    inner_part: Inner = Inner()
    ks: tuple[int, ...] = (5,)
    name: str | None = None

    @model_validator(mode="after")
    def _fits(self):
        if self.rounds == 13:
            raise ValueError("rounds that are lucky")
        return self


def test_keys_are_kebab_case_and_both_spellings_are_read():
    by_toml = Outer.parse({"rounds": 2, "inner-part": {"step-size": 0.5}})
    assert by_toml == Outer(rounds=2, inner_part=Inner(step_size=0.5))
    assert by_toml.table() == {
        "rounds": 2,
        "inner-part": {"step-size": 0.5, "mode": "fast"},
        "ks": [5],
    }


def test_docstrings_of_fields_are_descriptions_also_in_schemas():
    """Those of a base, too; a field that is declared anew has its own text or none."""

    class Derived(Outer):
        rounds: int = 1
        given: int = Field(5, description="Given.")
        """Below."""
        below: int = 6
        """Two
        lines."""

    assert Outer.descriptions() == {"rounds": "Number of rounds."}
    assert Derived.descriptions() == {"given": "Given.", "below": "Two\nlines."}
    properties = Derived.model_json_schema(by_alias=False)["properties"]
    assert {name for name, one in properties.items() if "description" in one} == {"given", "below"}


WRONG = [
    # settings, problem, expected, got, fix
    ({"rounds": "many"}, "wrong value for 'rounds'", "valid integer", "'many' (str)", "Number of"),
    ({"rounds": 1.5}, "wrong value for 'rounds'", "integer", "1.5 (float)", "Number of"),
    ({"inner-part": {"step-size": 1}}, "'inner-part.step-size'", "less than 1", "1 (int)", "How"),
    ({"inner-part": {"step-size": math.nan}}, "step-size'", "finite", "nan (float)", "How far"),
    ({"inner-part": {"mode": "slow"}}, "mode'", "'fast' or 'exact'", "'slow' (str)", None),
    ({"ks": [5, "x"]}, "wrong value for 'ks.1'", "integer", "'x' (str)", None),
    ({"round": 3}, "unknown key 'round'", None, "round = 3", "did you mean 'rounds'?"),
    ({"inner-part": {"step-sise": 1}}, "'inner-part.step-sise'", None, "= 1", "'step-size'?"),
    ({"rounds": 0, "zzz": 1, "y": 2}, "(and 2 more errors)", "to 1", "0 (int)", "rounds: Number"),
    ({"rounds": 13}, "inconsistent settings", "rounds that are lucky", "", None),
]


@pytest.mark.parametrize(("settings", "problem", "expected", "got", "fix"), WRONG)
def test_a_wrong_value_is_answered_with_key_expected_got_and_fix(
    settings, problem, expected, got, fix
):
    with pytest.raises(ExperimentError) as caught:
        Outer.parse({"rounds": 2, **settings})
    error = caught.value
    assert problem in error.problem and got in error.got
    for wanted, text in ((expected, error.expected), (fix, error.fix)):
        assert text is None if wanted is None else wanted in text


def test_the_key_of_the_table_is_part_of_the_key():
    for settings, problem in (
        ({"rounds": 13}, "wrong value for 'strategy'"),
        ({"rounds": 2, "round": 3}, "unknown key 'strategy.round'"),
    ):
        with pytest.raises(ExperimentError, match=problem):
            Outer.parse(settings, at="strategy")


# Errors: text, exit codes, and pickling between processes.

KINDS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, FedrecError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_pickling_keeps_kind_and_parts(kind):
    error = pickle.loads(pickle.dumps(kind("p", expected="e", got="g", fix="f")))
    assert type(error) is kind
    assert (error.problem, error.expected, error.got, error.fix) == ("p", "e", "g", "f")


@pytest.mark.parametrize("package", ["fedrec", "clients", "server", "strategies", "simulations"])
def test_every_error_says_how_to_fix_it(package):
    kinds = {kind.__name__ for kind in KINDS}
    files = list((Path(__file__).resolve().parents[2] / package).rglob("*.py"))
    calls = [
        (f"{file}:{call.lineno}", {keyword.arg for keyword in call.keywords})
        for file in files
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in kinds
    ]
    assert len(calls) > 1 and not [place for place, given in calls if "fix" not in given]


# The package itself: its names, and the packages beside it.


def test_every_public_name_is_there(tmp_path):
    table = {
        "name": "tiny",
        "dataset": {"name": "synthetic", "users": 24, "items": 30, "mean-interactions": 9},
        "evaluation": {"baselines": ["popularity"]},
    }
    rows = [(user, (user * 7 + n * n) % 13) for user in range(30) for n in range(4)]
    frame = pd.DataFrame(rows, columns=["Kunde", "Artikel"])
    given = {"output": tmp_path / "tried", "system": "linear"}
    tried = fedrec.try_table(frame, **given, overrides=["seed=1"])
    assert tried.folder == tmp_path / "tried" / "run" and tried.experiment.seed == 1
    assert len(repr(tried)) < 1000 and "popularity" in repr(tried)
    assert tried._repr_html_().count("<tr") == len(tried.baselines) + 2
    with pytest.raises(fedrec.FedrecError, match="not empty"):
        fedrec.try_table(frame, output=tmp_path / "tried")
    used = {
        "load": lambda: fedrec.load(table).name == "tiny",
        "run": lambda: fedrec.run(table, output=tmp_path / "run").metrics == {},
        "resume": lambda: fedrec.resume(tmp_path / "run").experiment.name == "tiny",
        "Result": lambda: "popularity" in fedrec.Result.load(tmp_path / "run").baselines,
        "Experiment": lambda: fedrec.Experiment.parse(table).resolve() == fedrec.load(table),
        "FedrecError": lambda: "fix: b" in str(fedrec.FedrecError("a", fix="b")),
        "try_table": lambda: "ease" in tried.baselines,
        "Interactions": lambda: callable(fedrec.Interactions.with_rows),
    }
    assert set(used) == set(fedrec.__all__) <= set(dir(fedrec))
    assert [name for name, works in used.items() if not works()] == []
    for nothing in (None, 3):
        with pytest.raises(fedrec.FedrecError, match="the experiment is missing"):
            fedrec.run(nothing)  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError, match="no attribute 'rum'"):
        _ = fedrec.rum


def import_in(folder, *options, code="import fedrec", **environment):
    (folder / "script.py").write_text(code)
    return subprocess.run(
        [sys.executable, *options, "script.py"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_file_that_hides_a_package_is_named_with_what_to_do(tmp_path, monkeypatch, name, form):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    hiding = tmp_path / (name if form == "folder" else f"{name}.py")
    if form == "folder":
        hiding.mkdir()
    (hiding / "__init__.py" if form == "folder" else hiding).touch()
    done = import_in(tmp_path)
    assert done.returncode == 1 and f"ImportError: {hiding} hides a package" in done.stderr
    assert f"the package {name!r} in {ROOT}" in done.stderr and "rename" not in done.stderr
    assert "fix: python -P script.py, or PYTHONSAFEPATH=1" in done.stderr
    works = "import fedrec; fedrec.run"
    assert import_in(tmp_path, "-P", code=works).returncode == 0
    assert import_in(tmp_path, code=works, PYTHONSAFEPATH="1").returncode == 0


@pytest.mark.slow
def test_a_folder_of_data_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in NEIGHBOURS:
        (tmp_path / name).mkdir()
    assert import_in(tmp_path, code="import fedrec; fedrec.run").returncode == 0


def test_each_package_has_types_for_others_and_the_citation_their_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert packages == ["fedrec", *NEIGHBOURS]
    assert all((ROOT / name / "py.typed").is_file() for name in packages)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for key in ("version", "license"):
        assert re.search(rf"^{key}: (.+)$", citation, re.M)[1] == project["project"][key]


# Named random streams: functions of their address, and independent of each other.


def test_golden_values():
    """If these numbers change, so does every experiment: announce it, and recompute every published
    number."""
    cohort = stream(0, "cohort", 1).integers(0, 2**32, 3)
    assert cohort.tolist() == [2181975029, 589668783, 3742344149]
    client = stream(7, "client", 12, 3).integers(0, 2**32, 3)
    assert client.tolist() == [4285863246, 1906745036, 3699478684]
    assert torch_stream(0, "init").initial_seed() == 3047793464569865906


ADDRESSES = [
    (0, "client", 1, 23),
    (0, "client", 12, 3),
    (0, "client", 123),
    (0, "client"),
    (0, "client", 0),
    (0, "client", 0, 0),
    (1, "client", 1, 23),
    (0, "client", 23, 1),
    (0, "cohort", 1, 23),
    (2**32, "client", 1, 23),
    (0, "client", 1 + 2**32, 23),
    (2**63 - 1, "client", 1, 23),
]


@pytest.mark.parametrize(("one", "other"), list(combinations(ADDRESSES, 2)))
def test_different_addresses_give_different_streams(one, other):
    assert stream(*one).integers(0, 2**63) != stream(*other).integers(0, 2**63)


def test_neighbouring_streams_are_uncorrelated():
    draws = np.stack([stream(0, "client", client, 1).standard_normal(2000) for client in range(30)])
    correlations = np.corrcoef(draws)[np.triu_indices(30, 1)]
    # Of 435 independent correlations with standard deviation 1/sqrt(2000) = 0.022, none is beyond 5
    # of them.
    assert np.abs(correlations).max() < 0.112
    assert correlations.std() == pytest.approx(1 / np.sqrt(2000), rel=0.15)


@pytest.mark.parametrize("address", [(-1, "client"), (0, "client", -1), (0, "client", 3, -2)])
def test_negative_parts_are_refused(address):
    with pytest.raises(ValueError, match=">= 0"):
        seed_sequence(*address)


# Graph attention against a dense computation and torch_geometric's layer; the third party by hand.


@pytest.fixture
def layer():
    """Three targets with up to four neighbours, one of them with none."""
    random = torch.Generator().manual_seed(0)
    targets, sources = (
        torch.randn(*shape, generator=random, dtype=torch.float64) for shape in ((3, 5), (3, 4, 5))
    )
    there = torch.tensor([[True] * 4, [True, True, False, False], [False] * 4])
    weight = torch.randn(5, 2, generator=random, dtype=torch.float64)
    ends = torch.randn(2, 2, generator=random, dtype=torch.float64)
    return targets, sources, there, weight, ends[0], ends[1]


def test_attention_is_the_sum_by_hand(layer):
    targets, sources, there, weight, of_source, of_target = (part.numpy() for part in layer)
    found = attended(*layer).numpy()
    for place in range(3):
        values = [sources[place, n] @ weight for n in range(4) if there[place, n]]
        raw = [v @ of_source + targets[place] @ weight @ of_target for v in values]
        weights = [math.exp(r if r > 0 else 0.2 * r) for r in raw]
        wanted = sum(
            (w / sum(weights) * v for w, v in zip(weights, values, strict=True)), np.zeros(2)
        )
        np.testing.assert_allclose(found[place], wanted, rtol=1e-12)


def test_a_third_party_is_restored_and_forgets_what_is_sent_anew():
    third = ThirdParty(5)
    for user, items in ((1, [10, NOTHING]), (4, [10, 30]), (6, [30, 10])):
        third.register(user, np.array(items), np.full(2, user, dtype=np.float32))
    again = ThirdParty(5)
    again.restore(third.state())
    np.testing.assert_array_equal(again.matched([4], 2, 2)[0], third.matched([4], 2, 2)[0])
    again.register(6, np.array([NOTHING] * 2), np.zeros(2, np.float32))
    assert again.matched([4], 2, 2)[1].tolist() == [[1, 0]]


@pytest.mark.parametrize("seed", range(40))
def test_neighbours_are_those_of_loops(seed):
    """Who follows a sender among the holders of its token, around the end."""
    random = np.random.default_rng(seed)
    slots, most = random.integers(1, 7, 2).tolist()
    third = ThirdParty(most)
    held = {}
    for sender in random.permutation(30)[: random.integers(0, 25)].tolist():
        held[sender] = random.permutation(12)[:slots]
        held[sender][random.permutation(slots)[: random.integers(0, slots + 1)]] = NOTHING
        third.register(sender, held[sender], np.full(2, sender, np.float32))
    asking = random.permutation(32)[: random.integers(0, 12)].tolist()
    wanted = np.zeros((len(asking), slots, most, 2), np.float32)
    numbers = np.zeros((len(asking), slots), np.int64)
    for place, sender in enumerate(asking):
        for slot, token in enumerate(held.get(sender, [])):
            same = sorted(one for one in held if token in held[one] and token != NOTHING)
            others = sorted(set(same) - {sender}, key=lambda one, own=sender: (one < own, one))
            numbers[place, slot] = len(others[:most])
            wanted[place, slot, : len(others[:most])] = np.array(others[:most])[:, None]
    given, counts = third.matched(asking, slots, 2)
    np.testing.assert_array_equal(given, wanted)
    np.testing.assert_array_equal(counts, numbers)


def test_tokens_reveal_only_which_items_are_equal_without_the_key():
    one, other = tokens([3, 5, 3], "key"), tokens([3, 5], "another")
    assert one[0] == one[2] != one[1] and not set(one) & set(other)
    assert one.dtype == np.int64 and (one >= 0).all()
