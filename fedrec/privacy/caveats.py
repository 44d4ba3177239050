# SPDX-License-Identifier: Apache-2.0
"""Caveats of an epsilon: its assumptions and limits, selected by the plan."""

from __future__ import annotations

from collections.abc import Iterator

from fedrec.privacy.accounting.sampling import Full, Poisson, Scheduled
from fedrec.privacy.plan import Plan

SIMULATION = "This is a simulation, not a release."
"""Printed with every epsilon of noise from a seed."""
_TRUST = {
    "central": (
        "The server is trusted: it sees each client's clipped update. The guarantee is against"
        " everybody who sees the model only, other clients among them."
    ),
    "distributed": (
        "The server must see nothing but the sum (secure aggregation). Accounted is the noise that"
        " is left when {dropouts} clients of a cohort fail; clients that collude know their shares"
        " and weaken it further."
    ),
    "local": (
        "Each upload is protected by its own noise, also against the server. Accounted is a client"
        " that takes part in all {rounds} rounds; sampling does not help, because the server knows"
        " who takes part."
    ),
}


def caveats(plan: Plan, *, backend: str | None = None) -> list[str]:
    """Sentences to report with an epsilon of a plan.

    Args:
        plan: the plan.
        backend: accountant, when it is not the plan's own.
    """
    return [
        *warnings(plan, backend=backend),
        *_about_the_number(plan),
        *_about_the_system(plan),
        *_about_the_rest(plan),
    ]


def warnings(plan: Plan, *, backend: str | None = None) -> Iterator[str]:
    """The sentences without which the number would be misleading, see `caveats`."""
    if backend == "paper":
        yield (
            "This reproduces the arithmetic of PrivRec's tables 4 and 5, which count every client"
            " of a round as a release of its own; it is not what the releases cost. Use it for"
            " comparison only."
        )
    if plan.delta > 1 / plan.honest:
        yield (
            f"delta {plan.delta:g} is above 1/N = {1 / plan.honest:.2g}: publishing one client's"
            " data whole, picked at random, would be allowed. Choose delta below 1/N."
        )


def _about_the_number(plan: Plan) -> Iterator[str]:
    if plan.config.adjacency == "replace-one":
        yield (
            "Neighbours differ in all data of one client, exchanged for another's; the number of"
            " clients is public."
        )
    else:
        yield (
            "Neighbours differ by one client with all its data, there or not; do not compare with"
            f" replace-one. The number of clients, {plan.honest}, is public all the same: it is"
            " printed with this result, and the sampling rate and a default delta are computed from"
            " it. The guarantee does not hide it."
        )
    if plan.clip_norm < plan.sensitivity < 2 * plan.clip_norm:
        yield (
            "No two contributions point away from each other (they have no signs), so exchanging"
            " one moves the sum by at most sqrt(2) times the clip norm, not twice that."
        )
    if plan.config.paper_noise_order:
        yield (
            "Noise is added after the server's learning rate, as in PrivRec's algorithm 2;"
            f" accounted is the multiplier that this leaves, {plan.noise_multiplier:g}."
        )


_ZEROS = (
    "Add-remove means here that a client sends its updates or zeros in their place: who else is"
    " drawn is the same."
)


def _about_the_system(plan: Plan) -> Iterator[str]:
    settings = plan.config
    yield _TRUST[settings.placement].format(dropouts=settings.max_dropouts, rounds=plan.rounds)
    if isinstance(plan.sampling, Scheduled):
        yield _scheduled(plan.sampling)
        if plan.config.adjacency == "add-remove" and plan.sampling.rate == 1:
            yield _ZEROS
    elif isinstance(plan.sampling, Full) and plan.denominator < plan.honest:
        yield from _known(plan)
    elif not isinstance(plan.sampling, Full):
        drawn = "independently" if isinstance(plan.sampling, Poisson) else "uniformly"
        yield (
            f"Amplification by sampling assumes that cohorts are drawn {drawn} from all"
            f" {plan.clients} clients and are kept secret. If only some clients are ever available,"
            " N is their number."
        )
    if plan.malicious:
        yield (
            f"An adversary made up {plan.malicious} of the {plan.clients} clients, and knows when"
            f" they are drawn: the guarantee is for the other {plan.honest}, and accounted is the"
            " probability with which they are drawn from among themselves."
        )
    yield from _remembered(plan)
    if settings.mode == "reproducible":
        yield (
            "Mode 'reproducible' is a simulation, not a release: noise and cohorts come from the"
            " experiment's seed. Whoever knows the seed can remove the noise; a release needs mode"
            " 'secure'."
        )


def _known(plan: Plan) -> Iterator[str]:
    """Who takes part depends on devices, or the server sees each upload by itself."""
    if plan.config.placement == "local":
        return
    yield (
        "Who takes part in a round depends on the speed and availability of devices, so nothing is"
        " gained by sampling: accounted is a client that takes part in every round. That devices"
        " answer early or late must not depend on their users' data."
    )
    if plan.config.adjacency == "add-remove":
        yield _ZEROS


def _scheduled(sampling: Scheduled) -> str:
    most = sampling.participations
    sampled = f" with probability {sampling.rate:.3g}" if sampling.rate < 1 else ""
    often = f"every {sampling.separation} rounds{sampled}" + (
        "" if most is None else f", at most {most} times"
    )
    known = (
        "Who takes part in which round may be known: nothing is gained by sampling."
        if sampling.rate == 1
        else "Whose turn it is may be known; who of these takes part is drawn by independent coin"
        " flips, which amplification assumes to be secret."
    )
    joining = "" if sampling.joining else ", and clients that join are refused"
    return (
        f"{known} Accounted is a client that takes part {often}; the sampler guarantees that none"
        f" does more often{joining}."
    )


def _remembered(plan: Plan) -> Iterator[str]:
    """The memory of correlated noise."""
    kept = plan.mechanism.kept
    if kept:
        how = (
            "in private/ of the run folder until the run is finished"
            if plan.config.mode == "secure"
            else "which a resumed run draws again from the seed"
        )
        yield (
            f"Noise is correlated between rounds: the server keeps at most {kept} arrays of the"
            f" size of the trained parameters, in float64, {how}. Whoever reads them can remove"
            " noise."
        )


def _about_the_rest(plan: Plan) -> Iterator[str]:
    if "*" not in plan.config.private_phases:
        yield (
            "Only the following phases run under noise:"
            f" {', '.join(plan.config.private_phases) or '(none)'}. A phase without noise makes the"
            " total infinite for those whose data it learns from; item sequences are users' data,"
            " and so is what items have in common because of them."
        )
    yield (
        "Not accounted: losses, metrics and numbers of examples that clients report, early"
        " stopping, and choosing settings by looking at results. Publish them only if they come"
        " from public data, or under their own budget."
    )
    yield (
        "The guarantee is per client: a person with two clients has at least twice the epsilon, and"
        " what others' data tell about somebody is not covered."
    )
