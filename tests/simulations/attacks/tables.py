# SPDX-License-Identifier: Apache-2.0
"""Experiments on synthetic data whose systems are attacked or audited."""


def synthetic(users, items, mean, **more):
    """The section of a synthetic dataset."""
    return {"name": "synthetic", "users": users, "items": items, "mean-interactions": mean, **more}


def experiment_on(dataset, nodes=1, **sections):
    """The table of an experiment in one process, with few metrics."""
    return {
        "positive-above": 3.0,
        "dataset": dataset,
        "evaluation": {"ks": [5], "baselines": []},
        "engine": {"name": "serial", "nodes": nodes, "threads": 1, "device": "cpu"},
        **sections,
    }
