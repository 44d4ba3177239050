# SPDX-License-Identifier: Apache-2.0
"""`fedrec data glove-subset`: the few vectors of a GloVe file that an experiment's users need, as a
small table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulations.cli import options


def glove_subset(
    file: Annotated[
        Path, typer.Argument(help="GloVe text file, such as glove.6B.50d.txt.", exists=True)
    ],
    experiment: Annotated[
        str, typer.Argument(help="Experiment whose user metadata determine the needed words.")
    ],
    output: Annotated[Path, options.output("Output file, for priors.source = 'table:FILE'.")],
    overrides: Annotated[list[str] | None, options.overrides()] = None,
) -> None:
    """Extract the vectors of the words in users' metadata from a GloVe file."""
    import json

    from fedrec.data.population import read_interactions
    from fedrec.experiment.loading import load
    from fedrec.priors.sources import read_glove
    from fedrec.privacy.personal.priors import PriorsConfig
    from fedrec.runtime.atomic_files import write_atomically

    loaded = load(experiment, overrides or [])
    named = PriorsConfig.parse(loaded.step.options.get("priors") or {}).words
    labels = {
        label
        for feature in read_interactions(loaded).user_features.features
        for label in feature.categories
    }
    words = {named.get(label, label).lower() for label in labels}
    found = read_glove(file, words)
    write_atomically(
        output, json.dumps({word: found[word].tolist() for word in sorted(found)}) + "\n"
    )
    missing = ", ".join(sorted(words - set(found))) or "none"
    typer.echo(f"{len(found)} of {len(words)} words; without a vector: {missing}")
    typer.echo(output)
