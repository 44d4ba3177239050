# SPDX-License-Identifier: Apache-2.0
"""`flwr run` of an app bundle with stock clients and fedrec's server."""

import os
import shutil

import pytest
import tomli_w

from tests.simulations.bundles import ROOT, flwr_run

pytestmark = pytest.mark.flower
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "stock-bundle"
version = "0.1.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "somebody"
fab-include = ["stock_bundle/*.py"]

[tool.flwr.app.components]
serverapp = "stock_bundle.server_app:app"
clientapp = "stock_bundle.client_app:app"

[tool.flwr.app.config]
experiment = ""
overrides = ""
output = ""
local-epochs = 2
"""
MODEL = '''
import torch
from fedrec.models.base import Model


class AsTorch(Model):
    """The network of the clients, under the same names."""

    def initial(self, generator):
        drawn = {"items.weight": torch.randn(30, 4, generator=generator)}
        drawn["score.weight"] = torch.zeros(1, 4)
        return drawn | {"score.bias": torch.zeros(1)}

    def predict(self, parameters, users, items, rows=None):
        own = parameters["items.weight"][torch.arange(len(items))[:, None], items]
        return (own * parameters["score.weight"]).sum(-1) + parameters["score.bias"]
'''


@pytest.fixture
def bundle(tmp_path, tiny_experiment, monkeypatch):
    app = tmp_path / "stock-bundle"
    (app / "stock_bundle").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PYPROJECT)
    (app / "stock_bundle" / "__init__.py").touch()
    (app / "stock_bundle" / "server_app.py").write_text(
        'from server.app import app\n\n__all__ = ["app"]\n'
    )
    (app / "stock_bundle" / "model.py").write_text(MODEL)
    shutil.copy(ROOT / "tests/server/deployed/stock_app.py", app / "stock_bundle" / "client_app.py")
    table = {
        **tiny_experiment(),
        "model": {"name": "stock_bundle.model:AsTorch"},
        "train-config": {"lr": 0.5},
    }
    table["sampler"] = {"name": "fixed-size", "cohort": 2}
    (tmp_path / "experiment.toml").write_text(tomli_w.dumps(table))
    # for this process, which reads the run folder; the run's have the bundle
    monkeypatch.syspath_prepend(str(app))
    return app


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_our_server_runs_clients_that_know_nothing_of_it(bundle, tmp_path):
    config = f"experiment='{tmp_path / 'experiment.toml'}'"
    run = flwr_run(bundle, tmp_path, config, [os.environ.get("PYTHONPATH", "")])
    result = run.read_result()
    assert set(result.metrics) == {"eval_acc"} and len(result.users) == 2
    assert result.rounds["num-examples"].tolist() == [41, 41]
    assert result.rounds["loss"][1] < result.rounds["loss"][0]
