# SPDX-License-Identifier: Apache-2.0
"""A record of the replies that a run did without, or that it scaled down: how many in each round,
of which nodes, and why.

In `rounds.csv`: `dropped-replies`, `bounded-replies` (numbers of replies) and `dropped-or-bounded`
(the nodes with the reasons; empty in rounds without any). A run on real nodes always has these
columns, a simulation only from the first such reply on. At the end of the run a sentence states the
totals. In privacy mode `secure` all of this is in the log alone, because only nodes with clients of
the cohort, which is secret, can fail to reply.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedrec.runtime.text_files import MOST_JSON, parse_json
from server.extension import RunExtension

_TOLD = 300  # characters of a reason
_NAMED = 5  # nodes in the sentence at the end
_IDS = re.compile(r"(?:\bnode )?\b(\d{6,20})\b")  # of Flower, which draws them at random


def with_names(text: str, names: Mapping[str, str]) -> str:
    """A text for people, with the names of nodes, such as `node-2`, in place of Flower's ids.

    Args:
        text: any text.
        names: of the nodes, by Flower's id; others stay as they are.
    """
    return _IDS.sub(lambda found: names.get(found[1], found[0]), text) if names else text


def name_nodes(record: logging.LogRecord, names: Mapping[str, str]) -> bool:
    """The same for a record of a log; to be used as its filter."""
    record.msg = with_names(record.getMessage(), names)
    record.args = None
    return True


class DroppedReplies(RunExtension):
    """Counts the replies of each round that were dropped or scaled down.

    Args:
        always: whether every round has the columns.
        secret: whether nothing is recorded outside the log.
        called: names of nodes for people, by Flower's id.
    """

    name = "replies"

    def __init__(
        self,
        *,
        always: bool = False,
        secret: bool = False,
        called: Mapping[str, str] | None = None,
    ) -> None:
        self._always = always and not secret
        self._secret = secret
        self._called = called or {}
        self._round: list[tuple[str, str]] = []  # what happened, and to whom, in this round
        self._counts: Counter[str] = Counter()  # replies by what happened, and rounds
        self._nodes: Counter[str] = Counter()

    def dropped(self, node: int | None, reason: str) -> None:
        """A reply is dropped, or did not come.

        Args:
            node: Flower's id of the node; None: unknown.
            reason: why.
        """
        self._add("dropped", node, reason)

    def bounded(self, node: int, reason: str) -> None:
        """A reply is scaled down, likewise."""
        self._add("bounded", node, reason)

    def columns(self) -> dict[str, Any]:
        """Numbers of replies in the round that ends, and the nodes."""
        found = self._round
        self._round = []
        if not (found or self._always):
            return {}
        self._always = True
        self._counts["rounds"] += bool(found)
        counts = Counter(what for what, _ in found)
        return {
            "dropped-replies": counts["dropped"],
            "bounded-replies": counts["bounded"],
            "dropped-or-bounded": "; ".join(text for _, text in found),
        }

    def memory(self) -> dict[str, np.ndarray]:
        """The totals, for a resumed run."""
        text = json.dumps([self._counts, self._nodes])
        return {"totals": np.frombuffer(text.encode(), dtype=np.uint8)}

    def restore(self, memory: dict[str, np.ndarray]) -> None:
        """Restore what `memory` returned."""
        if "totals" in memory:
            self._counts, self._nodes = map(
                Counter, parse_json(memory["totals"].tobytes(), MOST_JSON)
            )

    def report(self, rounds: int) -> tuple[list[str], dict[str, Any]]:
        """A sentence with the totals, the final evaluation included; none without such replies."""
        dropped = self._counts["dropped"]
        bounded = self._counts["bounded"]
        if not dropped + bounded:
            return [], {}
        words = (
            f"Replies of nodes: {dropped} dropped or missing, {bounded} scaled down, in"
            f" {self._counts['rounds']} of {rounds} rounds{self._most()}. The columns"
            " dropped-replies, bounded-replies and dropped-or-bounded of rounds.csv, and log.txt,"
            " say which and why."
        )
        return [words], {"dropped": dropped, "bounded": bounded, "in words": [words]}

    def _add(self, what: str, node: int | None, reason: str) -> None:
        if self._secret:
            return
        who = "a node" if node is None else with_names(f"node {node}", self._called)
        self._round.append((what, f"{who}: {' '.join(reason.split())[:_TOLD]}"))
        self._counts[what] += 1
        if node is not None:
            self._nodes[who] += 1

    def _most(self) -> str:
        if not self._nodes:
            return ""
        named = [f"{node} {count}" for node, count in self._nodes.most_common(_NAMED)]
        return " and the evaluations (" + ", ".join(named) + ")"
