# SPDX-License-Identifier: Apache-2.0
"""The choice of the training path: the fastest that is supported, with the reason; an error if the
requested path is not supported."""

import pytest
from torch import Tensor

from clients.hosting.node import Node
from clients.hosting.paths import TrainingPath, training_path
from clients.steps.sgd import Sgd
from fedrec.errors import ExperimentError
from fedrec.experiment.sections import Section
from fedrec.models.privrec import PrivRec


def path_of(node, **options):
    section = Section.model_validate({"name": "sgd", "batch-size": 8, **options})
    return training_path(node.step(section), node.model, node.experiment.engine)


def test_the_fastest_supported_path_is_taken_with_the_reason(load_tiny):
    node = Node(load_tiny(), 0, 1, None)
    assert path_of(node) == TrainingPath("kernel") and str(path_of(node)) == "kernel"
    assert path_of(node, rates={"item.id": 2.0}, **{"late-parameters": ["item.*"]}) == TrainingPath(
        "kernel"
    )
    for option in ("momentum", "weight-decay", "proximal-mu"):
        found = path_of(node, **{option: 0.5})
        assert found.name == "blocks" and "plain SGD" in str(found)
    assert path_of(node, **{"private-parameters": ["item.*"]}).name == "reference"
    assert node.paths == {"sgd": "kernel"}


@pytest.mark.parametrize(
    ("encoder", "compiled"), [("mean", ""), ("gru", ", recurrence in compiled code")]
)
def test_a_step_without_a_kernel_gives_the_reason(load_tiny, encoder, compiled):
    node = Node(load_tiny(f"step={{name='contrastive', encoder='{encoder}'}}"), 0, 1, None)
    assert node.paths == {"contrastive": f"blocks (step Contrastive has no kernel){compiled}"}


@pytest.mark.parametrize("path", ["blocks", "reference"])
def test_a_path_can_be_asked_for(load_tiny, path):
    assert path_of(Node(load_tiny(f"engine.path={path}"), 0, 1, None)) == TrainingPath(path)


def test_the_kernel_is_refused_with_the_reason_where_it_does_not_fit(load_tiny, run_tiny):
    node = Node(load_tiny("engine.path=kernel"), 0, 1, None)
    with pytest.raises(
        ExperimentError,
        match=r"(?s)cannot be trained by the kernel.*got: .*plain SGD.*leave out engine",
    ):
        path_of(node, momentum=0.5)
    with pytest.raises(ExperimentError, match="without momentum"):
        run_tiny("engine.path=kernel", "step.momentum=0.5")


def test_bfloat16_and_gpus_train_in_blocks(load_tiny):
    node = Node(load_tiny(), 0, 1, None)
    engine = node.experiment.engine.model_copy(update={"precision": "bf16"})
    assert training_path(node.step(node.experiment.step), node.model, engine).name == "blocks"
    step = node.step(node.experiment.step)
    step.device = step.device.__class__("cuda")
    assert "not on cuda" in str(training_path(step, node.model, node.experiment.engine))


class OtherLoss(PrivRec):
    """Inherits a kernel declaration that no longer describes it."""

    def loss(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        return 2 * super().loss(predictions, labels, weights)


class OwnDeclaration(OtherLoss):
    def kernel(self):
        return super().kernel()


class OtherBatches(Sgd):
    def batches(self, data, random):
        return super().batches(data, random)


def test_a_subclass_that_changes_what_is_computed_does_not_inherit_the_kernel(load_tiny):
    node = Node(load_tiny(), 0, 1, None)
    config, schema = node.model.config, node.model.schema
    assert node.model.declared_kernel() is not None
    assert OtherLoss(config, schema).declared_kernel() is None
    assert OwnDeclaration(config, schema).declared_kernel() is not None
    step = OtherBatches(node.step(node.experiment.step).config, node.model, node.device)
    found = training_path(step, node.model, node.experiment.engine)
    assert found.name == "blocks" and "OtherBatches overrides" in found.reason


def test_a_run_reports_its_training_path(run_tiny, capsys):
    from server.callbacks.progress import Progress

    run_tiny("rounds=1", callbacks=[Progress()])
    assert "training paths: step sgd: kernel" in capsys.readouterr().err
    run_tiny("rounds=1", "step.momentum=0.5", callbacks=[Progress()], output="other")
    assert "step sgd: blocks (the kernel takes plain SGD" in capsys.readouterr().err


def test_a_phase_that_trains_nothing_is_no_obstacle_to_the_kernel(load_tiny):
    node = Node(load_tiny("engine.path=kernel"), 0, 1, None)
    counts = Section.model_validate({"name": "counts"})
    assert training_path(node.step(counts), node.model, node.experiment.engine).name == "blocks"
