# SPDX-License-Identifier: Apache-2.0
"""Texts of a new package, beside its component; `{name}`, `{module}`, `{cls}` and `{kind}` stand
for its names."""

PYPROJECT = """\
[build-system]
requires = ["setuptools>=70.1"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
description = "A {kind} for fedrec"
requires-python = ">=3.11"
dependencies = ["fedrec"]

# This line makes `{name}` a name in experiments and in `fedrec list`.
[project.entry-points."fedrec.{kind}"]
{name} = "{module}.{kind}:{cls}"

[tool.setuptools]
packages = ["{module}"]

# `flwr run .` in this folder runs fedrec's server and clients with this package in the app bundle.
[tool.flwr.app]
publisher = "{module}"
fab-include = ["{module}/**/*.py", "{name}.toml"]

[tool.flwr.app.components]
serverapp = "{module}.server_app:app"
clientapp = "{module}.client_app:app"

[tool.flwr.app.config]
experiment = ""
overrides = ""
output = ""
"""

README = """\
# {name}

A {kind} for fedrec, in `{module}/{kind}.py`.

```
pip install --no-deps --editable .    # fedrec itself is installed already
fedrec list {kind}                     # it appears as {name}
{run}
pytest                                # the contract of a {kind}
```

The name `{name}` comes from the entry point in `pyproject.toml`. Without installing,
`"{module}.{kind}:{cls}"` works as a name wherever `{module}` can be imported, for example with
`PYTHONPATH=.`.
"""

FLOWER = """
Through Flower, from this folder, where fedrec is installed but this package need not be: it travels
in the app bundle.

```
flwr run . --stream \\
  --run-config "experiment='$PWD/{name}.toml' overrides='{kind}.name={module}.{kind}:{cls}'"
```
"""

TEST = '''\
"""The contract of a {kind}: what fedrec expects of `{cls}`."""

{imports}from {module}.{kind} import {cls}

from fedrec.testing import {contract}


class Test{cls}({contract}):
    component = {cls}
{settings}'''

WRITES_A_TABLE = '''
    @pytest.fixture(autouse=True)
    def write(self, tmp_path_factory):
        """The contract's tests read this file."""
        file = tmp_path_factory.mktemp("data") / "plays.csv"
        pairs = [(user, artist) for user in range(24) for artist in range(1, 9)]
        rows = [f"u{user},a{(user * artist) % 13},{user + artist}" for user, artist in pairs]
        file.write_text("\\n".join(["listener,artist,plays", *rows]) + "\\n")
        type(self).settings = {"path": str(file)}
'''

EXPERIMENT = """\
name = "{name}"
title = "{title}"
rounds = 20
positive-above = {above}

{dataset}
{sections}
[evaluation]
every = 5
users = 60
fine-tune = {{ epochs = 5 }}
baselines = [{baselines}]{metrics}

[engine]
name = "serial"
"""

SERVER_APP = '''"""fedrec's server as a Flower app, together with this package."""

from server.app import app

__all__ = ["app"]
'''

CLIENT_APP = '''"""fedrec's clients as a Flower app, together with this package."""

from clients.app import app

__all__ = ["app"]
'''
