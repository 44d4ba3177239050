# SPDX-License-Identifier: Apache-2.0
"""The private parts of Flower that a deployment leans on: when a new version moves one, the test's name says which."""

from __future__ import annotations

import inspect

import pytest
from flwr.clientapp import ClientApp

from fedrec import __version__
from fedrec.errors import ClientError
from simulations.deploy import flwr_private as private
from simulations.deploy.node import own_app


def test_the_supernodes_loop_sleeps_through_its_module_time():
    source = inspect.getsource(private.start_client_internal)
    assert "time.sleep(3)" in source and "time.sleep(0.5)" in source
    assert inspect.ismodule(private.start_client_internal.time)


def test_the_heartbeats_interval_is_read_where_we_set_it():
    for module in (private.heartbeat, private.fleet_http_connection):
        assert module.HEARTBEAT_DEFAULT_INTERVAL == 30
        assert "HEARTBEAT_DEFAULT_INTERVAL" in inspect.getsource(module)


def test_the_executor_asks_get_executor():
    assert "get_executor(" in inspect.getsource(private.run_superexec.run_superexec)
    for name in ("get_eligible_capacity", "launch", "reconcile", "close"):
        assert callable(getattr(private.ForkExecutor, name)) and f"executor.{name}" in inspect.getsource(
            private.run_superexec
        ) + inspect.getsource(private.run_superexec.AutoExecPlugin.__mro__[1])


def test_a_message_is_worked_on_by_run_clientapp_with_an_exchangeable_app():
    source = inspect.getsource(private.run_clientapp.run_clientapp)
    assert "get_load_client_app_fn(" in source and "install_from_fab(" in source


def test_the_superlinks_database_reads_its_patience_where_we_set_it():
    assert "SQLITE_PRAGMAS" in inspect.getsource(private.sql_mixin._set_sqlite_pragmas)
    assert dict(private.sql_mixin.SQLITE_PRAGMAS)["busy_timeout"] == "5000"


def test_the_executor_makes_its_client_by_name():
    assert "RuntimeHttpClient.from_server_address(" in inspect.getsource(private.run_superexec.run_superexec)
    assert "client.AcquireTask(" in inspect.getsource(private.run_superexec.run_superexec)


def test_polls_slow_down_without_work_and_are_fast_again_after_a_message():
    slept = []
    paced = private.PacedTime(fastest=0.1, growth=2.0, sleep=slept.append)
    for _ in range(7):
        paced.sleep(3)
    assert slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 3.0])
    paced.sleep(0.5)
    paced.sleep(3)
    assert slept[-2:] == pytest.approx([0.03, 0.1]) and paced.monotonic() > 0


def test_a_node_runs_its_own_code_and_only_with_its_own_version():
    assert isinstance(own_app("fedrec/fedrec", __version__, "whatever"), ClientApp)
    if __version__ != "0+unknown":
        with pytest.raises(ClientError, match="different versions"):
            own_app("fedrec/fedrec", "99.0", "whatever")
