# SPDX-License-Identifier: Apache-2.0
"""A node that runs its own code.

Missing in Flower: a SuperNode that does not run, or even install, the code that the server sends.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from flwr.clientapp import ClientApp

LoadApp = Callable[[str, str, str], ClientApp]
run_clientapp: Any = importlib.import_module("flwr.supernode.runtime.run_clientapp")


def use(load_app: LoadApp) -> None:
    """Let this process work on messages with an app of its own.

    Args:
        load_app: by the name, version and hash of the server's app.
    """
    run_clientapp.get_load_client_app_fn = lambda **_: load_app
    run_clientapp.install_from_fab = lambda *_, **__: None
