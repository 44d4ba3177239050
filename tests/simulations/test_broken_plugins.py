# SPDX-License-Identifier: Apache-2.0
"""A broken plug-in is reported with its file and the reason, and the rest of fedrec works.

Each kind is broken in up to five ways: it cannot be imported, a method has the wrong signature, it
returns NaN, it returns wrong shapes, it changes its input.
"""

import json
import sys
import textwrap
from importlib.metadata import EntryPoint
from uuid import uuid4

import pytest

from fedrec.components import registry

HEAD = """
import numpy as np
import torch
from clients.local.one_by_one import Update, one_by_one
from clients.step import Step
from clients.steps.sgd import Sgd
from fedrec.baselines.base import Baseline
from fedrec.data.interactions import Interactions
from fedrec.data.readers.synthetic import Synthetic
from fedrec.data.splits.user_holdout import UserHoldout
from fedrec.models.privrec import PrivRec
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from server.callbacks.base import Callback
from server.samplers.base import Sampler
from strategies.reptile import Reptile

class Alone(Step):
    def train_block(self, parameters, block, own=None):
        return one_by_one(parameters, block, own, self.alone)
"""

BROKEN = {
    # kind, how: (body of the class, what the error says)
    ("step", "signature"): (
        "class Bad(Step):\n def train_block(self, parameters): ...",
        "train_block(self, parameters",
    ),
    ("step", "update-alone"): (
        "class Bad(Step):\n def update(self, parameters, data, random): ...",
        "defines `update`, which is not called",
    ),
    ("step", "nan"): (
        """
        class Bad(Alone):
            def alone(self, parameters, data, random):
                bad = {n: torch.full_like(v, float("nan")) for n, v in parameters.items()}
                return Update(bad, 1, 0.0)
        """,
        "NaN or infinity in",
    ),
    ("step", "nan-in-blocks"): (
        """
        class Bad(Sgd):
            def train_block(self, parameters, block, own=None):
                trained = super().train_block(parameters, block, own)
                trained.values["layer0.bias"][0, 0] = float("nan")
                return trained
        """,
        "NaN or infinity in 'layer0.bias'",
    ),
    ("step", "shapes"): (
        """
        class Bad(Alone):
            def alone(self, parameters, data, random):
                return Update({n: v.sum() for n, v in parameters.items()}, 1, 0.0)
        """,
        "'item.id': (6,)",
    ),
    ("step", "shapes-in-blocks"): (
        """
        class Bad(Sgd):
            def train_block(self, parameters, block, own=None):
                trained = super().train_block(parameters, block, own)
                trained.values["layer0.bias"] = trained.values["layer0.bias"][:, :1]
                return trained
        """,
        "'layer0.bias': (6, 1)",
    ),
    ("step", "no-update"): (
        "class Bad(Alone):\n def alone(self, parameters, data, random): return {}",
        "got dict",
    ),
    ("step", "mutates"): (
        """
        class Bad(Alone):
            def alone(self, parameters, data, random):
                for value in parameters.values():
                    value.add_(1.0)
                return Update({n: torch.zeros_like(v) for n, v in parameters.items()}, 1, 0.0)
        """,
        "changed 'user.",
    ),
    ("step", "mutates-through-numpy"): (
        """
        class Bad(Alone):
            def alone(self, parameters, data, random):
                parameters["item.id"].numpy()[0] += 1
                return Update({n: torch.zeros_like(v) for n, v in parameters.items()}, 1, 0.0)
        """,
        "changed 'item.id' in place",
    ),
    ("step", "mutates-in-blocks"): (
        """
        class Bad(Sgd):
            def train_block(self, parameters, block, own=None):
                trained = super().train_block(parameters, block, own)
                parameters["item.id"].mul_(2)
                return trained
        """,
        "changed 'item.id'",
    ),
    ("step", "raises"): (
        "class Bad(Alone):\n def alone(self, parameters, data, random): return 1 / 0",
        "ZeroDivision",
    ),
    ("step", "constructor"): (
        "class Bad(Sgd):\n def __init__(self, config): ...",
        "__init__(self, config: 'StepConfig', model",
    ),
    ("model", "signature"): (
        "class Bad(PrivRec):\n def predict(self, parameters, items): ...",
        "predict(self, param",
    ),
    ("model", "optional-by-another-name"): (
        "class Bad(PrivRec):\n def predict(self, parameters, users, items, places=None): ...",
        "rows: 'Tensor | None' = None",
    ),
    ("model", "nan"): (
        """
        class Bad(PrivRec):
            def predict(self, parameters, users, items, rows=None):
                return super().predict(parameters, users, items, rows) * float("nan")
        """,
        "expected: finite predictions",
    ),
    ("model", "nan-at-first"): (
        """
        class Bad(PrivRec):
            def initial(self, generator):
                return {n: v / 0 for n, v in super().initial(generator).items()}
        """,
        "finite initial parameters",
    ),
    ("model", "shapes"): (
        """
        class Bad(PrivRec):
            def predict(self, parameters, users, items, rows=None):
                return super().predict(parameters, users, items, rows).unsqueeze(-1)
        """,
        "got: (2, 3, 1)",
    ),
    ("model", "mutates"): (
        """
        class Bad(PrivRec):
            def predict(self, parameters, users, items, rows=None):
                with torch.no_grad():
                    parameters["item.id"].add_(1)
                return super().predict(parameters, users, items, rows)
        """,
        "changed 'item.id' in place",
    ),
    ("strategy", "signature"): (
        "class Bad(Reptile):\n def apply(self, theta): ...",
        "apply(self, theta",
    ),
    ("strategy", "abstract"): (
        "from strategies.base import CohortStrategy\nclass Bad(CohortStrategy):\n pass",
        "got: no apply",
    ),
    ("strategy", "nan"): (
        """
        class Bad(Reptile):
            def apply(self, theta, aggregate):
                return {n: v * float("nan") for n, v in theta.items()}
        """,
        "training diverged in round 1",
    ),
    ("strategy", "shapes"): (
        """
        class Bad(Reptile):
            def apply(self, theta, aggregate):
                return {n: v.ravel() for n, v in theta.items()}
        """,
        "expected: the shapes {'user.",
    ),
    ("strategy", "lacks-one"): (
        "class Bad(Reptile):\n def apply(self, theta, aggregate): return {}",
        "KeyError",
    ),
    ("strategy", "of-flower"): (
        """
        class Bad(FlowerFedAvg):
            def aggregate_train(self, server_round, replies):
                raise LookupError("no more replies")
        """,
        "LookupError: no more replies",
    ),
    ("sampler", "signature"): ("class Bad(Sampler):\n def draw(self): ...", "draw(self, random"),
    ("sampler", "shapes"): (
        "class Bad(Sampler):\n def draw(self, random): return self.clients[:, None][:3]",
        "got: int64 [3, 1]",
    ),
    ("sampler", "repeats"): (
        "class Bad(Sampler):\n def draw(self, random): return self.clients[[0, 0, 1]]",
        "ascending and distinct",
    ),
    ("sampler", "strangers"): (
        "class Bad(Sampler):\n def draw(self, random): return np.array([10**6])",
        "got: [1000000]",
    ),
    ("sampler", "mutates"): (
        """
        class Bad(Sampler):
            def draw(self, random):
                self.clients += 1
                return self.clients[:2]
        """,
        "read-only",
    ),
    ("dataset", "signature"): ("class Bad(Synthetic):\n def read(self, path): ...", "read(self"),
    ("dataset", "shapes"): (
        "class Bad(Synthetic):\n def read(self): return super().read().frame()",
        "got: DataFrame",
    ),
    ("dataset", "nan"): (
        """
        from dataclasses import replace
        class Bad(Synthetic):
            def read(self):
                data = super().read()
                return replace(data, ratings=data.ratings * float("nan"))
        """,
        "a rating is not finite",
    ),
    ("dataset", "raises"): (
        "class Bad(Synthetic):\n def read(self): return open('/nowhere/a.csv')",
        "/nowhere/a.csv",
    ),
    ("split", "shapes"): (
        "class Bad(UserHoldout):\n def split(self, interactions): return 3",
        "got: int",
    ),
    ("split", "mutates"): (
        "class Bad(UserHoldout):\n def split(self, interactions): interactions.users[0] = 1",
        "read-only",
    ),
    ("baseline", "signature"): (
        "class Bad(Baseline):\n def fit(self): ...\n def scores(self): ...",
        "fit(self",
    ),
    ("baseline", "nan"): (
        """
        class Bad(Baseline):
            def fit(self, histories): ...
            def scores(self, histories):
                return torch.full((histories.num_users, histories.num_items), float("nan"))
        """,
        "got: NaN",
    ),
    ("baseline", "shapes"): (
        """
        class Bad(Baseline):
            def fit(self, histories): ...
            def scores(self, histories):
                return torch.zeros(histories.num_items)
        """,
        "expected: a tensor",
    ),
    ("baseline", "mutates"): (
        """
        class Bad(Baseline):
            def fit(self, histories):
                histories.items[:] = 0
            def scores(self, histories): ...
        """,
        "changed 'items' in place",
    ),
    ("callback", "signature"): (
        "class Bad(Callback):\n def after_round(self, row): ...",
        "after_round(self, row",
    ),
    ("callback", "raises"): (
        "class Bad(Callback):\n def after_round(self, row, seconds): row['no']",
        "KeyError: 'no'",
    ),
    ("callback", "mutates"): (
        """
        class Bad(Callback):
            def on_update(self, round_number, before, after):
                after["item.id"][:] = 0
        """,
        "read-only",
    ),
}


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """Writes a module with a class `Bad`, with the entry point `bad` in `fedrec.KIND`; returns its
    file."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(kind, body, head=HEAD):
        name = f"broken_{uuid4().hex}"  # never imported before
        file = tmp_path / f"{name}.py"
        file.write_text(head + textwrap.dedent(body) + "\n")
        entry = EntryPoint("bad", f"{name}:Bad", f"fedrec.{kind}")
        found = lambda group: [entry] if group == entry.group else []  # noqa: E731
        monkeypatch.setattr(registry, "entry_points", found)
        return file

    return write


def chosen(kind):
    """The override by which an experiment uses the plug-in."""
    lists = {"baseline": "evaluation.baselines=['bad']", "callback": "callbacks=[{name='bad'}]"}
    return lists.get(kind, f"{kind}.name=bad")


@pytest.mark.parametrize(("kind", "how"), BROKEN)
def test_a_run_with_a_broken_plug_in_names_it_and_the_reason(
    kind, how, plugin, tiny_file, fedrec, tmp_path
):
    body, reason = BROKEN[kind, how]
    file = plugin(kind, body)
    code, out, err = fedrec("run", tiny_file, "-o", tmp_path / "run", "-s", chosen(kind))
    text = " ".join(err.split())
    assert code not in (0, None) and "Traceback" not in out + err
    assert "error:" in err and reason in text, err
    if (kind, how) != ("dataset", "nan"):  # the invalid interactions are reported themselves
        assert str(file) in err or "is an abstract" in err, err


@pytest.mark.parametrize(
    ("kind", "how"), [key for key in BROKEN if key[1] in ("signature", "constructor", "abstract")]
)
def test_a_wrong_signature_is_seen_in_the_list(kind, how, plugin, fedrec):
    body, _ = BROKEN[kind, how]
    file = plugin(kind, body)
    code, out, _ = fedrec("list", kind, "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)[kind]}
    assert (
        code == 0
        and entries["bad"]["about"].startswith("BROKEN: ")
        and entries["bad"]["file"] == str(file)
    )
    assert "signature" in entries["bad"]["about"] or "abstract" in entries["bad"]["about"]
    assert len(entries) > 1 and not any(
        e["about"].startswith("BROKEN") for n, e in entries.items() if n != "bad"
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "import no_such_module_here",
            "ModuleNotFoundError: No module named 'no_such_module_here'",
        ),
        ("def (:", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt: "),
        ("from clients.steps.sgd import Nothing", "ImportError: cannot import name 'Nothing'"),
    ],
)
def test_an_import_error_is_reported_and_the_rest_works(
    line, reason, plugin, fedrec, tiny_file, tmp_path
):
    file = plugin("step", line, head="")
    code, out, err = fedrec("list", "--json")
    found = json.loads(out)
    steps = {entry["name"]: entry for entry in found["step"]}
    assert code == 0 and reason in steps["bad"]["about"] and steps["bad"]["file"] == str(file)
    everything = [e for entries in found.values() for e in entries]
    assert [e["name"] for e in everything if e["about"].startswith("BROKEN")] == [
        "bad"
    ] and "Traceback" not in err
    code, out, err = fedrec("run", tiny_file, "-o", tmp_path / "bad", "-s", "step.name=bad")
    assert code == 2 and reason in err and f"{file}, line 1" in err and "Traceback" not in out + err
    code, _, _ = fedrec("run", tiny_file, "-o", tmp_path / "good", "--quiet")
    assert code == 0


@pytest.mark.slow
@pytest.mark.ray
def test_on_ray_it_is_named_as_well(plugin, tiny_file, fedrec, tmp_path, monkeypatch):
    """The node is another process, which finds the module by PYTHONPATH and without an entry
    point."""
    file = plugin("step", BROKEN["step", "shapes"][0])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    arguments = ["--engine", "ray", "--nodes", 1, "-s", f"step.name={file.stem}:Bad"]
    code, out, err = fedrec("run", tiny_file, "-o", tmp_path / "run", *arguments)
    assert (
        code not in (0, None)
        and "Traceback" not in out + err
        and str(file) in err
        and "'item.id': (6,)" in err
    )
