# SPDX-License-Identifier: Apache-2.0
"""Two-stage training: participants, strategy and step of each round, and resuming in either
stage."""

import numpy as np
import pytest
from flwr.app import ConfigRecord

from fedrec.components.registry import STRATEGY
from fedrec.errors import ExperimentError
from fedrec.protocol.messages import unpack_train
from fedrec.protocol.orders import Presence
from fedrec.protocol.zero_copy import to_record
from fedrec.rng import stream
from server.cohorts.roster import Roster
from server.cohorts.selection import SampledCohorts
from server.strategy_state import make_strategy
from simulations import runner
from strategies.base import CohortStrategy
from strategies.fedavg import FedAvg
from strategies.reptile import Reptile, ReptileConfig
from tests.runs import assert_same_run, parameters_in, resumed

STEP = "step={name='contrastive', hidden=4, session-length=4, segment-length=2, masks=1, epochs=1}"
STAGES = (
    f"strategy={{name='two-stage', stage-one={{rounds=2, {STEP}, strategy={{name='reptile',"
    " server-lr=2.0}}}"
)


class Counting(CohortStrategy):
    """Moves by the mean update times the number of its rounds, which is its state."""

    Config = ReptileConfig
    rounds = 0

    def apply(self, theta, aggregate):
        self.rounds += 1
        return aggregate.added_to(theta, self.rounds / aggregate.clients)

    def state(self):
        return {"rounds": np.array(self.rounds)}

    def restore(self, state):
        self.rounds = int(state["rounds"])


@pytest.fixture
def made(load_tiny):
    """The strategy of the tiny experiment (18 clients on two nodes), created as by the server."""

    def make(*overrides):
        experiment = load_tiny("rounds=4", STAGES, *overrides)
        halves = [np.arange(place, 18, 2) for place in range(2)]
        roster = Roster(
            (70, 50), tuple(Presence(p, half, half[:0]) for p, half in enumerate(halves))
        )
        return make_strategy(experiment, SampledCohorts(experiment, roster))

    return make


def orders(strategy, round_number):
    record = to_record({"w": np.zeros(2, np.float32)})
    messages = list(strategy.configure_train(round_number, record, ConfigRecord(), None))
    return [unpack_train(message.content)[1] for message in messages]


def clients_of(strategy, round_number):
    return np.sort(np.concatenate([order.clients for order in orders(strategy, round_number)]))


@pytest.mark.usefixtures("identity")
def test_each_stage_orders_its_own_step_and_combines_by_its_own_rule(made):
    strategy = made("strategy.main={name='fedavg'}", "step.epochs=3")
    assert [strategy.phase(number) for number in (1, 2, 3, 4)] == [
        "stage-one",
        "stage-one",
        "main",
        "main",
    ]
    assert {order.step["name"] for order in orders(strategy, 2)} == {"contrastive"}
    assert {order.step["hidden"] for order in orders(strategy, 2)} == {4}
    assert {(order.step["name"], order.step["epochs"]) for order in orders(strategy, 3)} == {
        ("sgd", 3)
    }
    assert [order.weighting for order in orders(strategy, 1) + orders(strategy, 3)] == [
        "uniform"
    ] * 2 + ["examples"] * 2
    assert isinstance(strategy.strategy_of(2), Reptile)
    assert strategy.strategy_of(2).config.server_lr == 2
    assert isinstance(strategy.strategy_of(3), FedAvg)


@pytest.mark.usefixtures("identity")
def test_by_default_all_clients_take_part_in_both_stages_with_the_cohorts_of_one_stage(
    made, load_tiny
):
    strategy = made()
    for number in (1, 4):
        expected = np.sort(stream(0, "cohort", number).choice(np.arange(18), 6, replace=False))
        assert clients_of(strategy, number).tolist() == expected.tolist()


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize(("kind", "main"), [("opted-in", 18), ("public", 12)])
def test_a_share_of_the_clients_takes_part_in_stage_one(made, kind, main):
    settings = f"clients='{kind}'", "share=0.333", "sampler={name='fixed-size', cohort=6}"
    strategy = made(*(f"strategy.stage-one.{setting}" for setting in settings))
    first, second = (strategy.strategy_of(number).cohorts.clients for number in (1, 3))
    assert len(first) == 6 and len(second) == main
    assert len(np.intersect1d(first, second)) == (6 if kind == "opted-in" else 0)
    assert np.array_equal(np.union1d(first, second), np.arange(18))
    assert np.array_equal(clients_of(strategy, 1), first)
    assert np.array_equal(clients_of(strategy, 2), first)
    assert set(clients_of(strategy, 3)) <= set(second)
    same = made(*(f"strategy.stage-one.{s}" for s in settings))
    other = made("seed=1", *(f"strategy.stage-one.{s}" for s in settings))
    assert np.array_equal(same.strategy_of(1).cohorts.clients, first)
    assert not np.array_equal(other.strategy_of(1).cohorts.clients, first)


def test_a_cohort_larger_than_a_stage_is_refused(made):
    with pytest.raises(ExperimentError, match=r"sampler\.cohort"):
        made("strategy.stage-one.clients=public", "strategy.stage-one.share=0.9")


@pytest.mark.parametrize(
    ("override", "problem", "fix"),
    [
        (
            "strategy.stage-one.round=3",
            "unknown key 'strategy.stage-one.round'",
            "did you mean 'rounds'?",
        ),
        ("strategy.mian={name='reptile'}", "unknown key 'strategy.mian'", "did you mean 'main'?"),
        (
            "strategy.stage-one.step.hiden=3",
            "unknown key 'strategy.stage-one.step.hiden'",
            "did you mean 'hidden'?",
        ),
        (
            "strategy.main.server-rl=3.0",
            "unknown key 'strategy.main.server-rl'",
            "did you mean 'server-lr'?",
        ),
        (
            "strategy.stage-one.strategy={name='reptil'}",
            "unknown strategy 'reptil'",
            "did you mean 'reptile'?",
        ),
        (
            "strategy.stage-one.sampler={name='poison'}",
            "unknown sampler 'poison'",
            "did you mean 'poisson'?",
        ),
        ("strategy.stage-one.rounds=0", "wrong value for 'strategy.stage-one.rounds'", None),
        ("strategy.stage-one.share=0.5", "wrong value for 'strategy.stage-one'", None),
        ("strategy.stage-one.clients=public", "wrong value for 'strategy.stage-one'", None),
        ("strategy={name='two-stage'}", "missing key 'strategy.stage-one'", None),
    ],
)
def test_settings_are_checked_to_the_last_component(load_tiny, override, problem, fix):
    with pytest.raises(ExperimentError) as caught:
        load_tiny(STAGES, "strategy.main={name='reptile'}", override)
    assert caught.value.problem == problem and (fix is None or caught.value.fix == fix)


def test_defaults_are_filled_in_at_every_depth(load_tiny):
    experiment = load_tiny(STAGES)
    first, main = experiment.strategy.options["stage-one"], experiment.strategy.options["main"]
    reptile = {"name": "reptile", "anneal-after": 0}
    assert main == {**reptile, "server-lr": 1.0} and first["step"]["batch-size"] == 32
    assert first["strategy"] == {**reptile, "server-lr": 2.0} and first["clients"] == "all"
    assert experiment.resolve() == experiment
    assert experiment.settings(STRATEGY).stage_one.rounds == 2
    steps = {key: section.name for key, section in experiment.steps().items()}
    assert steps == {"step": "sgd", "strategy.stage-one.step": "contrastive"}


def test_a_strategy_that_is_not_fedrecs_own_cannot_be_a_stage(made):
    with pytest.raises(ExperimentError, match="cannot be a stage"):
        made("strategy.main={name='flwr.serverapp.strategy:FedAdam'}")


@pytest.mark.parametrize("at", ["strategy.main", "strategy.stage-one.strategy"])
def test_a_strategy_with_phases_of_its_own_cannot_be_a_stage(made, at):
    with pytest.raises(ExperimentError, match=r"phases of its own(.*\n)*.*around the two stages"):
        made(f"{at}={{name='popularity-start'}}", "model.item-bias=true")


def test_memories_are_kept_apart(made):
    inner = f"{{name='{__name__}:Counting'}}"
    strategy = made(f"strategy.stage-one.strategy={inner}", f"strategy.main={inner}")
    strategy.strategy_of(1).rounds, strategy.strategy_of(3).rounds = 2, 5
    again = made(f"strategy.stage-one.strategy={inner}", f"strategy.main={inner}")
    again.restore(strategy.state())
    assert (again.strategy_of(1).rounds, again.strategy_of(3).rounds) == (2, 5)


def test_stage_one_leaves_the_recommender_and_the_main_stage_the_encoders_as_they_are(
    run_tiny,
):
    first = run_tiny(STAGES, output="first")  # two rounds, both of stage one
    start = run_tiny(STAGES, "strategy.stage-one.strategy.server-lr=1e-30", output="start")
    whole = run_tiny(STAGES, "rounds=4", output="whole")
    begun, staged, ended = (parameters_in(result.folder) for result in (start, first, whole))
    encoders = {name for name in begun if name.startswith("session.")}
    changed = {name for name in begun if not np.array_equal(begun[name], staged[name])}
    assert changed == {"item.id", *encoders} and len(encoders) == 7
    assert {name for name in begun if np.array_equal(staged[name], ended[name])} == encoders
    assert whole.rounds["stage"].tolist() == [1, 1, 2, 2]
    assert np.isfinite(whole.rounds["loss"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_broken_off_in_either_stage_is_resumed_as_if_unbroken(run_tiny, after):
    inner = f"{{name='{__name__}:Counting'}}"
    overrides = [
        "rounds=4",
        STAGES,
        f"strategy.stage-one.strategy={inner}",
        f"strategy.main={inner}",
        "step={name='joint', hidden=4}",
    ]
    whole = run_tiny(*overrides, output="whole")
    assert_same_run(resumed(run_tiny, *overrides, after=after), whole)


@pytest.mark.slow
@pytest.mark.real_data
@pytest.mark.timeout(300)
def test_on_movielens(tmp_path):
    """Two rounds of stage one and one of the main stage on MovieLens-1M."""
    overrides = [
        "rounds=3",
        "strategy.stage-one.rounds=2",
        "sampler.cohort=4",
        "evaluation.users=2",
    ]
    overrides += ["evaluation.final-users=2", "evaluation.baselines=[]", "engine.name=serial"]
    result = runner.run("privrec-two-stage-ml1m", overrides, output=tmp_path / "run")
    assert result.rounds["stage"].tolist() == [1, 1, 2]
    assert result.parameters["item.id"].shape == (3706, 64)
    assert np.isfinite(result.rounds["loss"]).all()
