# SPDX-License-Identifier: Apache-2.0
"""The kernel of SGD: its parts, and its steps against PyTorch's."""

import itertools

import numpy as np
import pytest
import torch
from numba import njit
from torch.nn import functional as F

from fedrec.kernel import products
from fedrec.kernel.compiled import compiled
from fedrec.kernel.products import tile, transpose
from fedrec.kernel.rows import add_changed_rows, add_dense, aligned, powers, row_powers
from fedrec.nn.layers import ItemFeature, KernelModel, Layer, Product
from fedrec.training.block import Batches, Block
from fedrec.training.kernel import Guidance, train_block
from fedrec.training.sgd import SgdSettings
from tests.fedrec.training.declared_models import (
    ACTIVATIONS,
    ITEMS,
    WIDTH,
    bare_model,
    clients_of,
    model_of,
    model_of_features,
    predicted,
    start_of,
)

# Parts of the kernel against numpy in float64: products, activations, sums.

KERNEL_PARTS_F = np.float32
add_product = compiled(products.add_product.py_func)  # compiled once per machine: it takes 7 s
SIZES = [
    (1, 1, 1),
    (5, 1, 7),
    (1, 6, 4),
    (4, 6, 1),
    (3, 4, 5),
    (16, 40, 64),
    (7, 130, 90),
    (130, 65, 43),
    (64, 128, 72),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("transposed", list(itertools.product([False, True], repeat=2)), ids=str)
@pytest.mark.parametrize("factors", [(1.0, 0.0), (-0.5, 1.0), (2.0, 0.25)], ids=str)
def test_products_are_those_of_numpy(size, transposed, factors):
    rows, inner, columns = size
    random = np.random.default_rng(sum(size))
    a = random.normal(size=(inner, rows) if transposed[0] else (rows, inner)).astype(KERNEL_PARTS_F)
    b = random.normal(size=(columns, inner) if transposed[1] else (inner, columns)).astype(
        KERNEL_PARTS_F
    )
    out = random.normal(size=(rows, columns)).astype(KERNEL_PARTS_F)
    alpha, beta = factors
    wide = [(m.T if t else m).astype(float) for m, t in zip((a, b), transposed, strict=True)]
    wanted = alpha * wide[0] @ wide[1] + beta * out
    if not beta:
        out[:] = np.nan  # the previous content is arbitrary
    add_product(
        KERNEL_PARTS_F(alpha),
        a,
        transposed[0],
        b,
        transposed[1],
        KERNEL_PARTS_F(beta),
        out,
        np.empty(b.size, dtype=KERNEL_PARTS_F),
    )
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@compiled
def add_columns(a, b, out):
    """Of parts of wider matrices, the first transposed."""
    products.add_views(KERNEL_PARTS_F(-0.5), a[:, 1:].T, b[:, 2:-1], out[:, 3:])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_parts_of_matrices_are_those_of_numpy(size):
    rows, inner, columns = size
    random = np.random.default_rng(sum(size))
    a = random.normal(size=(inner, rows + 1)).astype(KERNEL_PARTS_F)
    b = random.normal(size=(inner, columns + 3)).astype(KERNEL_PARTS_F)
    out = random.normal(size=(rows, columns + 3)).astype(KERNEL_PARTS_F)
    wanted = out.astype(float)
    wanted[:, 3:] -= 0.5 * a[:, 1:].T.astype(float) @ b[:, 2:-1].astype(float)
    add_columns(a, b, out)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_tiles_have_names_of_their_own():
    """Functions of two processes' caches are one to the linker if the types of their arguments have
    the same names."""
    made = [tile(rows, width) for rows in (1, 4) for width in (1, 8)]
    assert len({repr(one) for one in made}) == len(made)


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (24, 16), (5, 30), (33, 70)], ids=str)
def test_transposing_moves_every_number(shape):
    values = np.arange(np.prod(shape)).reshape(shape).astype(KERNEL_PARTS_F)
    found = np.empty(shape[::-1], dtype=KERNEL_PARTS_F)
    transpose(values, found)
    assert np.array_equal(found, values.T)


FUNCTIONS = {
    products.IDENTITY: (lambda x: x, lambda y: np.ones_like(y)),
    products.RELU: (lambda x: np.maximum(x, 0), lambda y: (y > 0).astype(float)),
    products.SIGMOID: (lambda x: 1 / (1 + np.exp(-x)), lambda y: y * (1 - y)),
    products.TANH: (np.tanh, lambda y: 1 - y**2),
}


@pytest.mark.parametrize("code", FUNCTIONS)
def test_activations_are_within_two_units_in_the_last_place(code):
    values = np.concatenate(
        [np.linspace(-20, 20, 9001), np.linspace(-1e-3, 1e-3, 1001), [-300.0, 300.0]]
    ).astype(KERNEL_PARTS_F)
    found = values.copy().reshape(3, -1) if values.size % 3 == 0 else values.copy().reshape(1, -1)
    products.activate(found, code)
    function, derivative = FUNCTIONS[code]
    with np.errstate(over="ignore"):
        wanted = function(values.astype(float))
    np.testing.assert_allclose(found.reshape(-1), wanted, rtol=2.5e-7, atol=1e-38)
    gradients = np.full_like(found, 2.0)
    products.through_activation(gradients, found, code)
    np.testing.assert_allclose(
        gradients.reshape(-1), 2 * derivative(found.reshape(-1).astype(float)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("code", FUNCTIONS)
def test_no_number_stays_no_number(code):
    values = np.array([[np.nan, 1.0]], dtype=KERNEL_PARTS_F)
    products.activate(values, code)
    assert np.isnan(values[0, 0]) and np.isfinite(values[0, 1])


def test_memory_begins_a_cache_line():
    address = njit(lambda rows, columns: aligned(rows, columns).ctypes.data)
    assert all(address(rows, columns) % 64 == 0 for rows in (1, 3, 50) for columns in (1, 7, 64))


def test_dense_sums_leave_out_clients_of_share_zero():
    random = np.random.default_rng(0)
    start, room = (
        random.normal(size=1500).astype(KERNEL_PARTS_F),
        random.normal(size=(4, 1600)).astype(KERNEL_PARTS_F),
    )
    values = room[:, 70:1570]
    values[2] = np.nan
    totals, shares = random.normal(size=1500), np.array([1.0, -0.25, 0.0, 3.0])
    wanted = totals + sum(shares[c] * (values[c].astype(float) - start) for c in (0, 1, 3))
    add_dense(totals, start, room.reshape(-1)[70:-30], 1600, shares)
    np.testing.assert_allclose(totals, wanted, rtol=1e-12)


@pytest.mark.parametrize("order", [1, 2])
def test_powers_of_changes(order):
    random = np.random.default_rng(0)
    start = random.normal(size=700).astype(KERNEL_PARTS_F)
    room = random.normal(size=(3, 2, 700)).astype(KERNEL_PARTS_F)
    values = room[:, 1]
    np.testing.assert_allclose(
        powers(start, room.reshape(-1)[700:], 1400, 3, order),
        (np.abs(values - start).astype(float) ** order).sum(1),
        rtol=1e-12,
    )


def test_row_sums_give_each_item_a_slot():
    random = np.random.default_rng(0)
    start = random.normal(size=(9, 3)).astype(KERNEL_PARTS_F)
    values = random.normal(size=(6, 3)).astype(KERNEL_PARTS_F)
    changed = np.array([4, 7, 7, 0, 1, 2])
    firsts = np.array([0, 2, 4])
    counts = np.array([2, 1, 2])
    shares = np.array([1.0, 2.0, 0.0])
    totals, slots, rows = np.zeros((5, 3)), np.full(9, -1), np.zeros(5, dtype=np.int64)
    given = changed, firsts, counts, values
    used = add_changed_rows(totals, slots, rows, 0, start, *given, shares)
    assert used == 2 and rows[:2].tolist() == [4, 7]
    assert np.flatnonzero(slots >= 0).tolist() == [4, 7]
    moved = values.astype(float) - start[changed]
    np.testing.assert_allclose(totals[:2], [moved[0], moved[1] + 2 * moved[2]], rtol=1e-12)
    whole = np.zeros((9, 3))
    none = np.empty(0, np.int64)
    add_changed_rows(whole, none, none, 0, start[:0], *given, shares)
    wide = values.astype(float)
    np.testing.assert_allclose(whole[[4, 7]], [wide[0], wide[1] + 2 * wide[2]], rtol=1e-12)
    for order in (1, 2):
        powers_of = row_powers(start, *given, order)
        wanted = [
            (np.abs(moved[a : a + n]) ** order).sum() for a, n in zip(firsts, counts, strict=True)
        ]
        np.testing.assert_allclose(powers_of, wanted, rtol=1e-6)


# The kernel against autograd in float64: every activation, depth, loss, kind of input, late
# parameters, products, and guidance.


def by_autograd(model, start, user, batches, sgd, pull=0.0, guide=None):
    """One client in float64; parameters afterwards and the mean loss of its last epoch. Rows of the
    items that it touches are pulled towards `guide` in each step."""
    touched = batches.items[np.arange(batches.items.shape[1]) < np.array(batches.sizes)[:, None]]
    p = {name: value.double().clone() for name, value in start.items()}
    begins, losses = len(batches.sizes) - batches.last_epoch, []
    for step, size in enumerate(batches.sizes):
        for value in p.values():
            value.requires_grad_()
        items = torch.from_numpy(batches.items[step, :size])
        labels = torch.from_numpy(batches.labels[step, :size]).double()
        outputs = predicted(model, p, user, items)
        measure = F.binary_cross_entropy_with_logits if model.loss == "logistic" else F.mse_loss
        loss = measure(outputs, labels)
        found = torch.autograd.grad(
            loss, list(p.values()), allow_unused=True, materialize_grads=True
        )
        losses.append(loss.item())
        with torch.no_grad():
            for (name, value), gradient in zip(p.items(), found, strict=True):
                rate = 0.0 if name in sgd.late and step < begins else sgd.rate(name)
                p[name] = value.detach() - rate * gradient
                if name == model.item_table and pull:
                    rows = np.unique(touched)
                    p[name][rows] += pull * (guide[rows] - value.detach()[rows])
    return p, np.mean(losses[len(losses) - batches.last_epoch :]) if batches.last_epoch else np.nan


def check(model, start, sgd=None, clients=None, own=None):
    """Check every client's update and loss against autograd within rounding; returns the trained
    block."""
    sgd, (users, batches) = sgd or SgdSettings(0.3), clients or clients_of()
    block = Block.of(users, batches, torch.device("cpu"))
    before = {name: value.clone() for name, value in start.items()}
    trained = train_block(model, start, block, sgd, own)
    assert all(torch.equal(before[name], start[name]) for name in start)
    moved = 0.0
    for place, (user, own_batches) in enumerate(zip(users, batches, strict=True)):
        begin = start | {name: value[place] for name, value in (own or {}).items()}
        wanted, loss = by_autograd(model, begin, user, own_batches, sgd)
        got = trained.parameters_of(place)
        for name, value in wanted.items():
            update = got[name][0].double() - begin[name].double()
            exact = value - begin[name].double()
            scale = max(float(begin[name].abs().max()), float(exact.abs().max()))
            np.testing.assert_allclose(
                update.numpy(),
                exact.numpy(),
                rtol=1e-4,
                atol=4e-6 * scale,
                err_msg=f"{name} of {place}",
            )
            moved = max(moved, float(exact.abs().max()))
        np.testing.assert_allclose(trained.losses()[place], loss, rtol=1e-5)
    assert moved > 1e-2
    return trained


@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("hidden", [(), (7,), (8, 5), (16, 8, 8, 4)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_updates_are_those_of_autograd(activation, hidden, loss):
    model, widths = model_of(hidden, activation, loss)
    check(model, start_of(widths), SgdSettings(0.3 if loss == "logistic" else 0.02))


def test_wide_layers_and_batches():
    """Sizes that are not multiples of the vector size."""
    model, widths = model_of((70, 33), "tanh")
    check(model, start_of(widths, scale=0.2), clients=clients_of((300, 129), batch=128))


@pytest.mark.parametrize("hidden", [(64, 64), (128, 192), (256, 128, 64)], ids=str)
def test_layers_of_whole_vectors(hidden):
    """Those of ReLU with whole vectors; batches of 33 and, left over, of 3 and 30."""
    model, widths = model_of(hidden)
    check(model, start_of(widths, scale=0.2), clients=clients_of((300, 129), 2, 33))


def test_batches_in_which_few_categories_occur():
    """Of 500 categories, and none at all in the batches of one client."""
    codes = np.random.default_rng(4).integers(500, size=(ITEMS, 3))
    codes[: ITEMS // 2] = -1
    model, widths = model_of((8,), item_features=(ItemFeature("genres", codes),))
    widths[0] -= WIDTH
    start = {name: value for name, value in start_of(widths).items() if name != "eras"}
    start["genres"] = torch.randn(500, WIDTH, generator=torch.Generator().manual_seed(1))
    users, batches = clients_of((23, 8, 5))
    batches[1].items[:] %= ITEMS // 2
    trained = check(model, start, clients=(users, batches))
    assert torch.equal(trained.parameters_of(1)["genres"][0], start["genres"])


@pytest.mark.parametrize(
    "late",
    [{"items"}, {"items", "item.bias", "w0", "gender"}, {"offset", "genres", "b1"}],
    ids=lambda late: "+".join(sorted(late)),
)
def test_late_parameters_and_rates(late):
    model, widths = model_of(activation="tanh")
    rates = {"items": 3.0, "age": 0.0, "w1": 0.5, "b0": 2.0, "item.bias": 4.0}
    check(model, start_of(widths), SgdSettings(0.2, rates=rates, late=frozenset(late)))


@pytest.mark.parametrize(
    "still", ["items", "genres", "gender", "w0", "w1", "b0", "b2", "item.bias", "offset"]
)
def test_a_rate_of_zero_keeps_a_parameter(still):
    model, widths = model_of()
    start = start_of(widths)
    trained = check(model, start, SgdSettings(0.3, rates={still: 0.0}))
    assert torch.equal(trained.parameters_of(0)[still][0], start[still])


def test_without_features_bias_and_offset():
    model, start = bare_model()
    users, batches = clients_of()
    check(model, start, clients=([()] * len(users), batches))


def test_items_by_features_alone():
    model, start = model_of_features()
    users, batches = clients_of()
    check(model, start, clients=([user[:1] for user in users], batches))


OWN_ROWS = {
    "product": ((7,), (), Product("p", "factors")),
    "deep": ((16, 8), ("mine",), Product("p", "factors")),
    "rows": ((8, 5), ("mine", "other"), None),
    "wide": ((40, 24, 16), ("mine",), Product("p", "factors")),
}


def model_with_rows(case, loss="logistic", factors=5):
    """A model on rows of the user's own and items' rows, with a product or without; its initial
    parameters, and those of each of 4 clients."""
    hidden, rows, product = OWN_ROWS[case]
    widths = [(len(rows) + 1) * WIDTH, *hidden, 1]
    layers = tuple(Layer(f"w{place}", f"b{place}") for place in range(len(widths) - 1))
    model = KernelModel(layers, "relu", loss, item_table="items", user_rows=rows, product=product)
    random = torch.Generator().manual_seed(2)
    start = {n: v for n, v in start_of(widths).items() if n in (*model.dense, "items")}
    start |= {name: torch.randn(WIDTH, generator=random) for name in rows}
    if product:
        start |= {"p": torch.randn(factors, generator=random) * 0.3}
        start |= {"factors": torch.randn(ITEMS, factors, generator=random) * 0.3}
        last = layers[-1].weight
        start[last] = torch.randn(factors + hidden[-1], 1, generator=random) * 0.3
    own = {
        name: torch.randn(4, *start[name].shape, generator=random) * 0.5
        for name in (*rows, *(["p"] if product else []))
    }
    return model, start, own


@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("case", OWN_ROWS)
def test_rows_of_the_users_own_and_a_product(case, loss):
    model, start, own = model_with_rows(case, loss)
    users, batches = clients_of()
    rates = {"p": 3.0, "factors": 2.0, "mine": 4.0, "items": 5.0, model.layers[-1].weight: 0.5}
    sgd = SgdSettings(0.1 if loss == "logistic" else 0.01, rates=rates)
    check(model, start, sgd, ([()] * len(users), batches), own)


@pytest.mark.parametrize("still", ["p", "factors", "w1", "mine"])
def test_a_rate_of_zero_keeps_a_part_of_the_product(still):
    model, start, own = model_with_rows("deep")
    users, batches = clients_of()
    sgd = SgdSettings(0.3, rates={still: 0.0}, late=frozenset({"p"} - {still}))
    trained = check(model, start, sgd, ([()] * len(users), batches), own)
    begin = own.get(still, start[still].unsqueeze(0))
    assert torch.equal(trained.parameters_of(0)[still][0], begin[0])


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_guidance_moves_all_touched_rows_in_each_step(share):
    """The gradient is that of the rows before. Each client has rows of its own from the start."""
    model, start, own = model_with_rows("rows")
    users, batches = clients_of()
    block = Block.of([()] * len(users), batches, torch.device("cpu"))
    random = torch.Generator().manual_seed(5)
    whole = torch.randn(4, ITEMS, WIDTH, generator=random)
    guides = torch.randn(4, ITEMS, WIDTH, generator=random)
    given = own | {"items": torch.stack([t[r] for t, r in zip(whole, block.touched, strict=True)])}
    rows = torch.stack([t[r] for t, r in zip(guides, block.touched, strict=True)])
    sgd = SgdSettings(0.3)
    trained = train_block(model, start, block, sgd, given, Guidance(share, rows))
    for place, own_batches in enumerate(batches):
        begin = start | {name: value[place] for name, value in own.items()}
        begin["items"] = whole[place]
        guide = guides[place].double()
        wanted, _ = by_autograd(model, begin, (), own_batches, sgd, share, guide)
        touched = block.touched[place, : block.touched_counts[place]]
        got = {name: trained.values(name)[place].double() for name in trained.changes}
        got["items"] = got["items"][: len(touched)]
        wanted["items"] = wanted["items"][touched]
        for name, value in got.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def test_rows_that_are_not_those_of_the_block_are_refused():
    model, start, own = model_with_rows("rows")
    users, batches = clients_of()
    block = Block.of([()] * len(users), batches, torch.device("cpu"))
    given = own | {"items": torch.zeros(4, 3, WIDTH)}
    with pytest.raises(ValueError, match=r"Expected rows of 'items' of shape \(4, "):
        train_block(model, start, block, SgdSettings(0.1), given)


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_factorization_with_factors_of_the_clients_own(loss):
    """q_i . p_u + b_i + b_u + b, where p_u and b_u are private."""
    model = KernelModel(
        (Layer("p"),),
        "identity",
        loss,
        item_table="q",
        item_bias="item.bias",
        offsets=("user.bias", "b"),
    )
    random = torch.Generator().manual_seed(0)
    shapes = {"p": (5,), "q": (ITEMS, 5), "item.bias": (ITEMS, 1), "user.bias": (1,), "b": (1,)}
    start = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    users, batches = clients_of()
    own = {
        "p": torch.randn(4, 5, generator=random),
        "user.bias": torch.randn(4, 1, generator=random),
    }
    check(model, start, SgdSettings(0.05, late=frozenset({"q"})), ([()] * len(users), batches), own)


def test_one_step_of_a_factorization_by_hand():
    """p = (1, 2), q = (3, 1), r = 4: the error is 3 + 2 - 4 = 1, so p moves by -.1 * 2 * q and q by
    -.1 * 2 * p."""
    model = KernelModel((Layer("p"),), "identity", "squared", item_table="q")
    start = {"p": torch.tensor([1.0, 2.0]), "q": torch.tensor([[9.0, 9.0], [3.0, 1.0]])}
    batches = Batches.cut([(np.array([1]), np.array([4.0], dtype=np.float32))], 1)
    trained = train_block(
        model, start, Block.of([()], [batches], torch.device("cpu")), SgdSettings(0.1)
    )
    own = trained.parameters_of(0)
    torch.testing.assert_close(own["p"][0], torch.tensor([1 - 0.6, 2 - 0.2]))
    torch.testing.assert_close(own["q"][0], torch.tensor([[9.0, 9.0], [3 - 0.2, 1 - 0.4]]))
    assert trained.losses() == [1.0]


def test_what_diverges_is_no_number_and_stays_with_its_client():
    """A client with infinite labels gets NaN; the other client of the block is unaffected."""
    model, widths = model_of(loss="squared")
    users, batches = clients_of((9, 9))
    batches[0].labels[0, 0] = np.inf
    start = start_of(widths)
    both = train_block(
        model, start, Block.of(users, batches, torch.device("cpu")), SgdSettings(0.02)
    )
    alone = train_block(
        model, start, Block.of(users[1:], batches[1:], torch.device("cpu")), SgdSettings(0.02)
    )
    assert not both.parameters_of(0)["b0"].isfinite().all()
    assert all(
        torch.equal(both.parameters_of(1)[name], value)
        for name, value in alone.parameters_of(0).items()
    )


def without(start, name):
    return {key: value for key, value in start.items() if key != name}


MISFITS = {
    "a parameter is missing": lambda start: without(start, "b1"),
    "a parameter too many": lambda start: start | {"other": torch.zeros(1)},
    "a bias of another length": lambda start: start | {"b1": torch.zeros(3)},
    "a weight of other inputs": lambda start: start | {"w0": start["w0"][:-1]},
    "two outputs": lambda start: start | {"w2": torch.zeros(5, 2), "b2": torch.zeros(2)},
    "two offsets": lambda start: start | {"offset": torch.zeros(2)},
    "too few items": lambda start: start | {"items": start["items"][:20]},
    "too few biases of items": lambda start: start | {"item.bias": start["item.bias"][:20]},
    "too few categories of items": lambda start: start | {"genres": start["genres"][:2]},
    "too few categories of users": lambda start: start | {"age": start["age"][:4]},
    "float64": lambda start: start | {"w1": start["w1"].double()},
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused_and_not_looked_at(case):
    """Native code would read and write beyond the end of an array."""
    model, widths = model_of()
    users, batches = clients_of()
    with pytest.raises(ValueError, match="Expected"):
        train_block(
            model,
            MISFITS[case](start_of(widths)),
            Block.of(users, batches, torch.device("cpu")),
            SgdSettings(0.1),
        )
