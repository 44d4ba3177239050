# SPDX-License-Identifier: Apache-2.0
"""Frappe: 96,203 rows of mobile app usage, 957 users, 4,082 apps, each row with its context
(Baltrunas et al., 2015).

A row says that a user used an app `cnt` times in one context; a (user, app) pair has 5 rows on
average. There are no star ratings: `cnt` is the rating here, and there are no times.

PrivRec (section 3.2) treats daytime, weekday, isweekend, homework, weather, country and city as
features of the user. They vary from row to row, so the feature of a user is the value that most of
the user's rows have (of equals, the first in alphabetical order). PrivRec's 288,609 interactions
are these rows and two sampled negatives for each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from fedrec.data.features import Feature, FeatureNames, FeatureTable
from fedrec.data.interactions import Interactions
from fedrec.data.reader import DatasetSource, Reader
from fedrec.data.tables import TableLayout, read_table

_CONTEXT = ("daytime", "weekday", "isweekend", "homework", "weather", "country", "city")
_USAGE = TableLayout(
    {
        "user": np.int32,
        "item": np.int32,
        "cnt": np.float32,
        "cost": str,
        **dict.fromkeys(_CONTEXT, str),
    },
    names="first line",
)
_APPS = TableLayout({"item": np.int32, "category": str}, names="first line", quoted=True)


class Frappe(Reader):
    """Reads `frappe.csv`, and app categories from `meta.csv` if present. Import only: no direct
    download."""

    name = "frappe"
    title = "Frappe: 96,203 rows of app usage, 957 users, 4,082 apps"
    paper = (
        "PrivRec; L. Baltrunas et al., Frappe: Understanding the Usage and Perception of Mobile App"
        " Recommendations"
    )
    source = DatasetSource(
        page="https://www.baltrunas.info/context-aware/frappe",
        licence=(
            "research use with acknowledgement; no redistribution, no commercial use without"
            " permission"
        ),
        files=("frappe.csv",),
        extras=("meta.csv", "README.txt"),
        users=957,
        items=4_082,
        rows=96_203,
        fingerprints=("b23699fb46d8614269915466ff38cfdfe67d9fb42b04b74e6e3c695ee574e770",),
    )

    def read(self) -> Interactions:
        rows, usage = self.rows(_USAGE, ("users", "items", "ratings"))
        features = [
            Feature.single(name, _most_frequent(rows.users, usage[name])) for name in _CONTEXT
        ]
        return replace(
            rows,
            user_features=FeatureTable(rows.num_users, tuple(features)),
            item_features=self._item_features(rows, usage["cost"]),
        )

    def feature_names(self) -> FeatureNames:
        """Names of users' contexts, apps' costs, and app categories if `meta.csv` is present."""
        described = any(file.name == "meta.csv" for file in self.files())
        return FeatureNames(tuple(_CONTEXT), ("cost", "category") if described else ("cost",))

    def _item_features(self, rows: Interactions, cost: pd.Series) -> FeatureTable:
        features = [Feature.single("cost", _most_frequent(rows.items, cost))]
        if (self.folder() / "meta.csv").is_file():
            apps = read_table(self.file("meta.csv"), _APPS)
            category = dict(zip(apps["item"].tolist(), apps["category"], strict=True))
            names = (category.get(app) for app in rows.item_ids.tolist())
            features.append(Feature.multiple("category", [[n] if n else [] for n in names]))
        return FeatureTable(rows.num_items, tuple(features))


def _most_frequent(owner: np.ndarray, labels: pd.Series) -> list[str]:
    """Most frequent label of each owner, ascending; ties are resolved in alphabetical order."""
    frame = pd.DataFrame({"owner": owner, "label": labels.to_numpy()})
    counts = frame.value_counts(sort=False).rename("rows").reset_index()
    best = counts.sort_values(
        ["owner", "rows", "label"], ascending=[True, False, True]
    ).drop_duplicates("owner")
    return best["label"].tolist()
