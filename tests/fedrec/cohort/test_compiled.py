# SPDX-License-Identifier: Apache-2.0
"""Compiled perceptrons against torch.nn in float64, and what happens where they cannot be had."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import hatch_build
from fedrec.cohort import compiled
from fedrec.cohort.compiled import CompiledPerceptron
from fedrec.cohort.fused import FusedDescent
from fedrec.cohort.layers import perceptron
from fedrec.row_sum import RowAccumulator

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "fedrec" / "cohort" / "compiled.c"
HERE = sys.platform == "linux" and shutil.which("cc") and torch.backends.mkl.is_available()
pytestmark = pytest.mark.skipif(not HERE, reason="needs Linux, a C compiler and a PyTorch with MKL")


def copied(folder):
    """The source in a folder, with what calls it."""
    shutil.copy(SOURCE.with_name("compiled.py"), folder)
    return Path(shutil.copy(SOURCE, folder))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A library of its own, so that it is what the source says now, whatever is installed."""
    return compiled._Library(hatch_build.compiled(copied(tmp_path_factory.mktemp("compiled"))))


@pytest.fixture
def on(made, monkeypatch):
    """One thread, and the library in use; gives the number of calls."""
    threads, calls = torch.get_num_threads(), []
    torch.set_num_threads(1)
    passes = CompiledPerceptron.forward
    monkeypatch.setattr(CompiledPerceptron, "forward", lambda self, parts: calls.append(1) or passes(self, parts))
    monkeypatch.setattr(compiled, "library", lambda: made)
    yield calls
    torch.set_num_threads(threads)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def parameters_of(clients, widths):
    pairs = list(itertools.pairwise(widths))
    return [draw(clients, a, b) / a**0.5 for a, b in pairs], [draw(clients, b, seed=9) for _, b in pairs]


def marked(parameters, rates, clients):
    """Copies that a perceptron of the first clients updates in its backward pass, the copies, and the anchor."""
    anchor = torch.zeros((), requires_grad=True)
    copies = [value.clone() for value in parameters]
    leaves = [copy[:clients] for copy in copies]
    for leaf, rate in zip(leaves, rates, strict=True):
        leaf.descent = FusedDescent(leaf, rate, anchor)
    return leaves, copies, anchor


CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SHAPES = {
    "users-and-items": ([(1, 5), (32, 16), (32, 7)], [33, 17, 1]),
    "user-in-the-middle": ([(6, 3), (1, 4), (6, 2)], [8, 3]),
    "one-layer": ([(7, 3)], [1]),
    "one-layer-of-users": ([(1, 3), (4, 2)], [2]),
    "one-example": ([(1, 3), (1, 40)], [20, 1]),
    "privrec": ([(1, 192), (32, 64), (32, 64)], [256, 128, 64, 32, 1]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_both_passes_and_the_step_are_those_of_torch(on, shape):
    """Of the first two of three clients, as when the third has no steps left."""
    inputs, widths = SHAPES[shape]
    weights, biases = parameters_of(3, [sum(width for _, width in inputs), *widths])
    rates = [0.01 * (place + 1) for place in range(2 * len(weights))]
    leaves, moved, anchor = marked([*weights, *biases], rates, 2)
    parts = [draw(2, *own).requires_grad_() for own in inputs]
    outputs = perceptron([[part] for part in parts], leaves[: len(weights)], leaves[len(weights) :], "relu")
    assert on, "PyTorch's operations did it"
    examples = max(count for count, _ in inputs)
    assert outputs.shape == ((2, examples) if widths[-1] == 1 else (2, examples, widths[-1]))
    gradients = torch.autograd.grad(outputs.square().sum(), [anchor, *parts], allow_unused=True)[1:]
    for client in range(2):
        linear = [nn.Linear(w.shape[1], w.shape[2], dtype=torch.float64) for w in weights]
        for layer, weight, bias in zip(linear, weights, biases, strict=True):
            layer.weight.data, layer.bias.data = weight[client].T.double(), bias[client].double()
        network = nn.Sequential(*[stage for layer in linear for stage in (layer, nn.ReLU())][:-1])
        own = [part.detach()[client].double().requires_grad_() for part in parts]
        expected = network(torch.cat([part.expand(examples, -1) for part in own], 1))
        torch.testing.assert_close(outputs[client].detach().double().view_as(expected), expected.detach(), **CLOSE)
        expected.square().sum().backward()
        for place, layer in enumerate(linear):
            changed = weights[place][client].double() - rates[place] * layer.weight.grad.T
            torch.testing.assert_close(moved[place][client].double(), changed, **CLOSE)
            changed = biases[place][client].double() - rates[len(linear) + place] * layer.bias.grad
            torch.testing.assert_close(moved[len(linear) + place][client].double(), changed, **CLOSE)
        for gradient, part in zip(gradients, own, strict=True):
            torch.testing.assert_close(gradient[client].double(), part.grad, **CLOSE)
    for before, after in zip([*weights, *biases], moved, strict=True):
        assert torch.equal(before[2], after[2]), "a client that no longer trains moved"


def test_sums_of_updates_are_those_of_numpy(on):
    """Of the first three of five clients; the second counts for nothing, and what it holds is not a number."""
    sizes = [(1,), (127,), (128,), (129,), (256, 3), (37, 29), (2049,), (4, 1)]
    start = {size: draw(*size) for size in sizes}
    values = {size: draw(5, *size, seed=1)[:3] for size in sizes}
    for own in values.values():
        own[1].fill_(torch.nan)
    shares, totals = torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64), {s: draw(*s, seed=2).double() for s in sizes}
    moved = {size: own.double() - start[size].double() for size, own in values.items()}
    expected = {size: totals[size] + 0.5 * own[0] - 2 * own[2] for size, own in moved.items()}
    stayed = draw(3).double()
    assert compiled.add_updates({**totals, "stayed": stayed}, {**start, "stayed": draw(3)}, values, shares) == {*sizes}
    for size, total in totals.items():
        torch.testing.assert_close(total, expected[size], rtol=1e-12, atol=1e-12)
    assert torch.equal(stayed, draw(3).double())


def test_only_what_suits_compiled_code_is_added_up_by_it(on):
    shares = torch.ones(3, dtype=torch.float64)
    fine = draw(6, 2).double(), draw(6, 2), draw(3, 6, 2)
    cases = {
        "fine": fine,
        "fewer-clients": (*fine[:2], draw(2, 6, 2)),
        "sums-of-another-precision": (draw(6, 2), *fine[1:]),
        "start-of-another-precision": (fine[0], draw(6, 2).double(), fine[2]),
        "values-of-another-precision": (*fine[:2], draw(3, 6, 2).double()),
        "another-shape": (*fine[:2], draw(3, 2, 6)),
        "sums-of-another-shape": (draw(2, 6).double(), *fine[1:]),
        "against-the-grain": (*fine[:2], draw(3, 2, 6).transpose(1, 2)),
        "sums-against-the-grain": (draw(2, 6).double().T, *fine[1:]),
    }
    cases = {name: (case[0].clone(memory_format=torch.preserve_format), *case[1:]) for name, case in cases.items()}
    before = {name: totals.clone() for name, (totals, _, _) in cases.items()}
    given = ({name: case[place] for name, case in cases.items()} for place in range(3))
    assert compiled.add_updates(*given, shares) == {"fine"}
    for name, (totals, _, _) in cases.items():
        assert name == "fine" or torch.equal(totals, before[name])
    assert compiled.add_updates({"w": fine[0]}, {"w": fine[1]}, {"w": fine[2]}, shares.float()) == set()


def test_sums_of_rows_are_those_of_numpy_and_stay_inside_their_tables(on):
    """Of three clients; the second counts for nothing, and what it holds is not a number; some rows are padding."""
    start, values, shares = draw(7, 5), draw(3, 4, 5, seed=1), torch.tensor([0.5, 0.0, -2.0], dtype=torch.float64)
    values[1].fill_(torch.nan)
    touched, counts = torch.tensor([[1, 3, 6, 0], [0, 2, 3, 4], [3, 5, 0, 0]]), (3, 4, 2)
    total = RowAccumulator((7, 5))
    total.add(np.array([5, 2]), np.ones((2, 5)))  # some have a sum already
    expected = np.zeros((7, 5))
    expected[[5, 2]] += 1
    for client in (0, 2):
        for place in range(counts[client]):
            item = touched[client, place]
            change = values[client, place].double() - start[item].double()
            expected[item] += shares[client].item() * change.numpy()
    given = start, touched, counts, values, shares
    assert compiled.add_row_updates(total, *given)
    found = total.total()
    assert found.rows.tolist() == [1, 2, 3, 5, 6]
    np.testing.assert_allclose(found.dense(np.zeros((7, 5))), expected, rtol=1e-12, atol=1e-12)
    for wrong in (-1, 7):
        with pytest.raises(IndexError, match="below 7"):
            compiled.add_row_updates(total, start, torch.full_like(touched, wrong), counts, values, shares)
    assert not compiled.add_row_updates(total, start[:, :4], touched, counts, values, shares), "another width"
    assert not compiled.add_row_updates(total, start, touched[:, :2], counts, values, shares), "fewer items"
    assert not compiled.add_row_updates(total, start, touched, (3, 5, 2), values, shares), "more rows than there are"
    assert not compiled.add_row_updates(total, start, touched, counts, values, shares[:2]), "fewer shares"
    assert not compiled.add_row_updates(RowAccumulator((8, 5)), *given), "another table"


def test_not_a_number_is_not_lost(on):
    """A diverged client must be told; ReLU of NaN is NaN."""
    weights, biases = parameters_of(2, [3, 4, 1])
    weights[0][1, 0, 0] = torch.nan
    leaves, moved, anchor = marked([*weights, *biases], [0.1] * 4, 2)
    part = draw(2, 5, 3).requires_grad_()
    outputs = perceptron([[part]], leaves[:2], leaves[2:], "relu")
    torch.autograd.grad(outputs.sum(), [anchor, part], allow_unused=True)
    assert on and outputs[0].isfinite().all() and outputs[1].isnan().all()
    assert moved[1][0].isfinite().all() and moved[1][1].isnan().any()


def test_a_client_has_the_same_bits_in_any_company(on):
    inputs, widths = SHAPES["privrec"]
    weights, biases = parameters_of(3, [sum(width for _, width in inputs), *widths])
    parts = [draw(3, *own) for own in inputs]
    alone = []
    for clients in (3, 1):
        leaves, moved, anchor = marked([*weights, *biases], [0.1] * 10, clients)
        own = [part[:clients].clone().requires_grad_() for part in parts]
        outputs = perceptron([[part] for part in own], leaves[:5], leaves[5:], "relu")
        gradients = torch.autograd.grad(outputs.square().sum(), [anchor, *own], allow_unused=True)[1:]
        alone.append([value[0].clone() for value in (outputs, *moved, *gradients)])
    assert on and all(map(torch.equal, *alone))


@pytest.mark.parametrize("reason", ["activation", "precision", "threads", "nothing to do", "no library"])
def test_otherwise_the_operations_of_torch_do_it(on, monkeypatch, reason):
    kind = torch.float64 if reason == "precision" else torch.float32
    weights, biases = ([own.to(kind) for own in drawn] for drawn in parameters_of(2, [3, 4, 1]))
    part = draw(2, 0 if reason == "nothing to do" else 5, 3).to(kind)
    leaves, _, _ = marked([*weights, *biases], [0.1] * 4, 2)
    if reason == "threads":
        torch.set_num_threads(2)
    if reason == "no library":
        monkeypatch.setattr(compiled, "library", lambda: None)
    activation = "tanh" if reason == "activation" else "relu"
    outputs = perceptron([[part]], leaves[:2], leaves[2:], activation)
    torch.testing.assert_close(outputs, perceptron([[part]], weights, biases, activation))
    assert not on


def test_a_weight_that_others_stand_for_is_left_to_them(on):
    """Its parts hold what it has learned, and it does not, until they are joined."""
    weights, biases = parameters_of(2, [3, 4, 1])
    values = [own.clone() for own in (*weights, *biases)]
    groups = [
        SimpleNamespace(in_parts=place == 0, held=None, part=lambda _, count: draw(2, count, 4)) for place in range(4)
    ]
    for value, group in zip(values, groups, strict=True):
        value.descent = FusedDescent(value, 0.1, torch.zeros((), requires_grad=True), group)
    part, other = draw(2, 5, 1), draw(2, 5, 2)
    perceptron([[part], [other]], values[:2], values[2:], "relu")
    assert not on


@pytest.mark.parametrize("wrong", ["inputs", "layers", "biases", "clients"])
def test_what_does_not_fit_is_refused_by_torch_and_not_read_beyond_its_end(on, wrong):
    weights, biases = parameters_of(2, [3, 4, 1])
    part = draw(1 if wrong == "clients" else 2, 5, 4 if wrong == "inputs" else 3)
    if wrong == "layers":
        weights[1] = draw(2, 5, 1)
    if wrong == "biases":
        biases[0] = draw(2, 3)
    leaves, _, _ = marked([*weights, *biases], [0.1] * 4, 2)
    with pytest.raises(RuntimeError):
        perceptron([[part]], leaves[:2], leaves[2:], "relu")
    assert not on


def test_the_library_is_of_this_version_of_its_source(tmp_path, monkeypatch):
    """One of another version is not used, and goes when this one is made."""
    source, find = copied(tmp_path), compiled.library.__wrapped__
    caller = source.with_name("compiled.py")
    monkeypatch.setattr(compiled, "__file__", str(caller))
    monkeypatch.setattr(sys, "path", [])
    assert find() is None
    made = [hatch_build.compiled(source)]
    assert find() is not None
    for changed in (source, caller):
        changed.write_text(changed.read_text() + "\n")
        assert find() is None
        made.append(hatch_build.compiled(source))
        assert find() is not None
        assert sorted(tmp_path.iterdir()) == sorted([source, caller, made[-1]])
    assert len(set(made)) == 3


def test_a_copy_of_python_files_alone_uses_the_library_of_what_is_installed(tmp_path, monkeypatch):
    installed, copy = tmp_path / "installed", tmp_path / "copy"
    (installed / "fedrec" / "cohort").mkdir(parents=True)
    copy.mkdir()
    source = copied(installed / "fedrec" / "cohort")
    hatch_build.compiled(source)
    caller = Path(shutil.copy(source.with_name("compiled.py"), copy))
    monkeypatch.setattr(compiled, "__file__", str(caller))
    find = compiled.library.__wrapped__
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nothing"), str(installed)])
    assert find() is not None
    caller.write_text(caller.read_text() + "\n")
    assert find() is None, "a library that this version does not know how to call"


@pytest.mark.parametrize(("compiler", "source"), [("no-such-compiler", "int a;"), ("cc", "this is not C")])
def test_without_a_working_compiler_there_is_none_and_it_is_said(tmp_path, monkeypatch, capfd, compiler, source):
    monkeypatch.setenv("CC", compiler)
    file = tmp_path / "compiled.c"
    file.write_text(source)
    caller = Path(shutil.copy(SOURCE.with_name("compiled.py"), tmp_path))
    assert hatch_build.compiled(file) is None
    assert "was not compiled" in capfd.readouterr().err and sorted(tmp_path.iterdir()) == sorted([caller, file])


@pytest.mark.parametrize("compiler", ["cc", "no-such-compiler"])
def test_wheels_hold_the_library_and_are_of_one_platform_then(tmp_path, monkeypatch, compiler):
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("fedrec", "clients", "server", "strategies", "simulations"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "fedrec" / "cohort").mkdir()
    copied(tmp_path / "fedrec" / "cohort")
    monkeypatch.setenv("CC", compiler)
    build = "from hatchling.build import build_wheel; print(build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, text=True)
    wheel = done.stdout.split()[-1]
    libraries = [name for name in zipfile.ZipFile(tmp_path / "dist" / wheel).namelist() if name.endswith(".so")]
    if compiler == "cc":
        assert "-py3-none-linux_" in wheel and len(libraries) == 1
        assert libraries[0].startswith("fedrec/cohort/compiled-")
    else:
        assert wheel.endswith("-py3-none-any.whl") and not libraries
