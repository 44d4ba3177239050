# SPDX-License-Identifier: Apache-2.0
"""One local Ray and one SuperLink per test process, for tests that need one but do not test its
start."""

import contextlib
import tempfile
from pathlib import Path

import pytest

CORES, STORE_BYTES = 4, 2**26


class SharedEngines:
    """Starts each engine when it is first needed, and stops it at the end, or before a test that
    starts its own."""

    def __init__(self):
        self._started = {}

    def of(self, engine):
        """The engine's resources, available until `stop`."""
        if engine not in self._started:
            stack = contextlib.ExitStack()
            found = stack.enter_context({"ray": _ray, "flower": _superlink}[engine]())
            self._started[engine] = stack, found
        return self._started[engine][1]

    def stop(self, *engines):
        """Stop some engines; without names, all."""
        for engine in engines or tuple(self._started):
            stack, _ = self._started.pop(engine, (contextlib.nullcontext(), None))
            if isinstance(stack, contextlib.ExitStack):
                stack.close()


ENGINES = SharedEngines()


@contextlib.contextmanager
def _ray():
    import ray

    from simulations.engines.ray import alone, connect

    with alone():
        connect(None, CORES, STORE_BYTES)
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def _superlink():
    """Port and environment of a SuperLink with simulations."""
    import types

    from simulations.engines import flower

    with tempfile.TemporaryDirectory(prefix="fedrec-tests-") as folder:
        port = flower._free_port()
        environment = flower._environment(Path(folder) / "home", port)
        with flower._superlink(types.SimpleNamespace(path=Path(folder)), environment, port):
            yield port, environment


@pytest.fixture
def shared_engine(request, monkeypatch):
    """Runs of the engine in the test's parameter `engine`, of Ray without one, join the Ray or the
    SuperLink that all tests of this process share."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    engine = params.get("engine", "ray")
    found = ENGINES.of(engine)
    if engine == "flower":
        port, environment = found
        monkeypatch.setattr("simulations.engines.flower._free_port", lambda: port)
        monkeypatch.setattr("simulations.engines.flower._environment", lambda *_: environment)
        monkeypatch.setattr(
            "simulations.engines.flower._superlink", lambda *_: contextlib.nullcontext()
        )
