# SPDX-License-Identifier: Apache-2.0
"""The operator's page: processes, nodes and runs with their rounds, metrics, budget and warnings.

Everything is read from the SuperLink and from run folders; nothing is changed. The page is served
over TLS, with the certificate of the deployment's gateway, to users with its key. It listens only
on this machine unless another address is given, and answers only `GET /`. The key is in a file that
is readable by its owner only, and is sent as the password of HTTP's basic authentication.
"""

import base64
import hmac
import logging
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import httpx
import pandas as pd
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from fedrec.errors import EngineError, FedrecError
from fedrec.report.page.sections import Note, PageTable, Row, number_cell, rendered
from fedrec.runs.folder import RunFolder
from simulations.deployment import operator
from simulations.deployment.gateway import serve_over_tls
from simulations.deployment.layout import Deployment, new_secret, write_private

_RUNS = 5  # newest runs on the page
_ROUNDS = 10  # newest rounds of each
_FAULTS = 20  # newest warnings of each
_KNOWN = "epsilon", "dropped-replies", "num-clients", "loss"


class _RunPart(NamedTuple):
    """A run on the page: facts by name, its newest rounds, its newest warnings."""

    name: str
    facts: tuple[tuple[str, str], ...]
    rounds: PageTable | None
    faults: tuple[str, ...]


def page(deployment: Deployment) -> str:
    """The page as self-contained HTML."""
    from simulations.deployment.superlink import Control

    notes = []
    known = []
    try:
        with Control(deployment) as control:
            known = control.nodes()
    except (httpx.HTTPError, OSError) as error:
        notes.append(Note(f"The SuperLink does not answer: {error}", warning=True))
    folders = sorted(
        (file.parent for file in (deployment.path / "runs").glob("*/run.json")),
        key=lambda folder: folder.stat().st_mtime,
        reverse=True,
    )
    return rendered(
        "federation.html.j2",
        title=f"Federation {deployment.path.name}",
        stamp=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        notes=notes,
        processes=operator.process_table(operator.states(deployment)),
        nodes=operator.node_table(known),
        runs=[_run_part(folder) for folder in folders[:_RUNS]],
    )


def _run_part(folder: Path) -> _RunPart:
    """Read the run in a folder; a damaged run has its error as a fact."""
    try:
        run = RunFolder(folder)
        state = run.status()
        experiment = run.experiment
        rounds = run.read_rounds()
    except FedrecError as error:
        return _RunPart(folder.name, (("state", error.problem),), None, ())
    facts = [
        ("state", str(state["state"])),
        ("rounds", f"{state['round']:,} of {experiment.rounds:,}"),
    ]
    if experiment.privacy is not None:
        spent = "none yet" if "epsilon" not in rounds else f"{rounds['epsilon'].iloc[-1]:.4g}"
        most = experiment.privacy.epsilon
        facts.append(("epsilon spent", spent))
        facts.append(("budget", "none set" if most is None else f"epsilon {most:g}"))
    if "dropped-replies" in rounds:
        facts.append(
            ("replies dropped or missing", f"{rounds['dropped-replies'].to_numpy().sum():,.0f}")
        )
    return _RunPart(folder.name, tuple(facts), _rounds(rounds), _faults_in(run.log_file))


def _faults_in(log: Path) -> tuple[str, ...]:
    """Newest warnings and errors of a log, newest first."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    faults = [line for line in lines if " WARNING " in line or " ERROR " in line]
    return tuple(reversed(faults[-_FAULTS:]))


def _rounds(rounds: pd.DataFrame) -> PageTable | None:
    if rounds.empty:
        return None
    metrics = [name for name in rounds if "@" in name or name in ("rmse", "mae", "mrr")]
    names = [name for name in _KNOWN if name in rounds] + metrics
    rows = tuple(
        Row(f"{int(row['round'])}", tuple(number_cell(float(row[name])) for name in names))
        for row in rounds.tail(_ROUNDS).iloc[::-1].to_dict("records")
    )
    return PageTable("Newest rounds", ("round", *names), rows)


log = logging.getLogger("fedrec")
USER = "operator"
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def key_file(deployment: Deployment) -> Path:
    """File with the page's key, which is drawn on first use."""
    file = deployment.server / "page.secret"
    if not file.exists():
        write_private(file, new_secret())
    return file


def create_app(deployment: Deployment) -> Starlette:
    """Create the page as an ASGI application."""
    expected = f"{USER}:{key_file(deployment).read_text().strip()}".encode()

    async def show(request: Request) -> Response:
        if not hmac.compare_digest(_credentials(request), expected):
            client = request.client.host if request.client else "?"
            log.warning("refused the page to %s", client)
            challenge = {"www-authenticate": 'Basic realm="fedrec", charset="UTF-8"'}
            return PlainTextResponse("refused\n", 401, {**_HEADERS, **challenge})
        return HTMLResponse(await run_in_threadpool(page, deployment), headers=_HEADERS)

    return Starlette(routes=[Route("/", show, methods=["GET"])])


def serve(deployment: Deployment, host: str, port: int) -> None:
    """Serve the page until it is stopped.

    Raises:
        EngineError: the address is in use.
    """
    try:
        serve_over_tls(
            create_app(deployment),
            host,
            port,
            deployment.server / "gateway.crt",
            deployment.server / "gateway.key",
        )
    except SystemExit:
        raise EngineError(
            f"the page cannot be served on {host}:{port}, see the line above",
            fix="choose another --port",
        ) from None


def _credentials(request: Request) -> bytes:
    """User and key of a request; empty if missing."""
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    try:
        return base64.b64decode(text, validate=True) if kind.lower() == "basic" else b""
    except ValueError:
        return b""
