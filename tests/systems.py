# SPDX-License-Identifier: Apache-2.0
"""Overrides that make another federated system of the tiny experiment."""

SAME = ("split={name='ratio'}", "evaluation.fine-tune={epochs=0}")
LAST_OUT = ("split={name='leave-one-out'}", "evaluation.fine-tune={epochs=0}")
METAMF = (
    "model={name='metamf', user=4, memory=5, generator=8, embedding=4, rank=2, hidden=3}",
    "step={name='metamf'}",
    "strategy={name='metamf', server-lr=0.02}",
    *SAME,
)
MF = (
    "model={name='mf', factors=3}",
    "step={name='sgd', epochs=2, private-parameters=['user.*'], late-parameters=['item.*']}",
    "strategy={name='fed-adam', server-lr=0.05}",
    *SAME,
)
GPFEDREC = (
    "model={name='gpfedrec', embedding=4, hidden=[6]}",
    "step={name='gpfedrec', learning-rate=0.5}",
    "strategy={name='gpfedrec', server-lr=0.05}",
    *LAST_OUT,
)
FEDGNN = (
    "model={name='fedgnn', embedding=4}",
    "step={name='fedgnn', user-rate=0.5}",
    "strategy={name='fedgnn', server-lr=0.05, neighbours=3, history=6}",
    *LAST_OUT,
)
FEDNCF = (
    "model={name='neumf', factors=2, tower=[4, 3]}",
    "step={name='sgd', private-parameters=['user.*']}",
    "strategy={name='fed-adam', server-lr=0.05}",
    *SAME,
)
PFEDREC = (
    "model={name='pfedrec', embedding=4}",
    "step={name='pfedrec'}",
    "strategy={name='fed-adam', server-lr=0.05}",
    *SAME,
)
FEDRAP = (
    "model={name='fedrap', embedding=4}",
    "step={name='fedrap'}",
    "strategy={name='fed-adam', server-lr=0.05}",
    *SAME,
)
DPVAE = ("model={name='vae', hidden=6, latent=3}", "sampler.cohort=12", *SAME)
NOISE = "participations=2"
COUNTS = "{name='counts', low-rated=0.25}"
CLIPS = "parameters=['item.products'], clip-norm=3.0, phases={popularity={"
PHASE = "parameters=['item.bias'], clip-norm=2.0, noise-factor=2.0}}"
FOLD_IN = (
    "rounds=2",
    "model={name='fold-in', items=12, factors=5, low-rated=0.25}",
    "step={name='gram', exponent=0.2, low-rated=0.25}",
    f"strategy={{name='popularity-start', step={COUNTS}, main={{name='fold-in'}}}}",
    f"privacy={{epsilon=3.0, delta=1e-5, {CLIPS}{PHASE}}}",
    "sampler={name='full'}",
    "evaluation.fine-tune={epochs=0}",
)
NEXT = ("step={name='sequence', rates={'item.id'=5.0}}", *LAST_OUT)
SASREC = (
    "model={name='sasrec', width=4, longest=5, blocks=1, loss='sampled-softmax', negatives=6}",
    "strategy={name='fed-adam', server-lr=0.05, weighting='examples'}",
    *NEXT,
)
GRU4REC = ("model={name='gru4rec', width=4, longest=5}", "strategy={name='fedavg'}", *NEXT)
TRANSITIONS = (
    "rounds=2",
    "model={name='transitions', window=3}",
    "step={name='transitions'}",
    "strategy={name='popularity-start', main={name='transitions'}}",
    "sampler={name='full'}",
    *LAST_OUT,
)
DP_TRANSITIONS = (
    *TRANSITIONS,
    "model={name='transitions', window=3, items=12}",
    "step={name='transitions', exponent=0.2}",
    "privacy={epsilon=3.0, delta=1e-5, adjacency='replace-one', parameters=['item.weights'],"
    f" clip-norm=3.0, phases={{popularity={{{PHASE}}}",
)
SYSTEMS = {
    "sasrec": SASREC,
    "gru4rec": GRU4REC,
    "metamf": METAMF,
    "mf": MF,
    "fedncf": FEDNCF,
    "pfedrec": PFEDREC,
    "fedrap": FEDRAP,
    "gpfedrec": GPFEDREC,
    "fedgnn": FEDGNN,
    "dpvae, sound": (
        *DPVAE,
        f"step={{name='dpvae', clip='user', priors={{}}, learning-rate=1e-4, {NOISE}}}",
    ),
    "dpvae, paper": (*DPVAE, "step={name='dpvae', mode='paper', examples=3, learning-rate=1e-4}"),
    "dpsgd": (
        *("model={name='mf', factors=3}", "sampler.cohort=12", *SAME),
        "evaluation.fine-tune={upload=false}",
        f"step={{name='dpsgd', private-parameters=['user.*'], {NOISE}}}",
    ),
}
