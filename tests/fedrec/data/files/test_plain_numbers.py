# SPDX-License-Identifier: Apache-2.0
"""Ids that are read as numbers are those whose texts are the numbers'; by the same files read as
text."""

import numpy as np
import pandas as pd
import pytest

from fedrec.data.files.plain_numbers import all_plain
from fedrec.data.files.recognition import recognise
from fedrec.data.readers.table import Table

PLAIN = {
    "plain": "user,item,rating\n1,20,3.5\n0,7,05\n",
    "quoted": 'user,item,text\n"1","20",3\n2,7,"a ""b"", 007"\n',
    "windows": "user,item\r\n1,20\r\n2,7\r\n",
    "no last line end": "user,item\n1,20\n2,7",
    "empty lines": "user,item\n\n1,20\n\n2,7\n",
    "negative": "user,item\n-1,20\n2,7\n",
    "a break within quotes": 'user,item,text\n1,20,"x\n007,y"\n2,7,z\n',
    "18 digits": "user,item\n999999999999999999,20\n2,7\n",
}
OTHERS = {
    "padded": "user,item\n1,20\n2,007\n",
    "minus zero": "user,item\n1,20\n-0,7\n",
    "plus": "user,item\n+1,20\n2,7\n",
    "space": "user,item\n 1,20\n2,7\n",
    "space at the end": "user,item\n1,20\n2,7 \n",
    "decimal": "user,item\n1,20\n2,7.0\n",
    "text": "user,item\n1,20\n2,x\n",
    "missing": "user,item\n1,20\n,7\n",
    "too few values": "user,item\n1,20\n2\n",
    "19 digits": "user,item\n1,20\n9999999999999999999,7\n",
    "nothing": "user,item\n1,20\n2,\n",
    "minus alone": "user,item\n1,20\n-,7\n",
    "quotes within": 'user,item\n1,20\n"1""2",7\n',
}


def written(tmp_path, text):
    file = tmp_path / "table.csv"
    file.write_bytes(text.encode())
    return file


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_texts_of_numbers_are_told_from_others(tmp_path, name):
    file = written(tmp_path, {**PLAIN, **OTHERS}[name])
    assert all_plain(file, ",", (0, 1), header=True, quoted=True) == (name in PLAIN)


def test_a_first_line_counts_where_it_has_no_names(tmp_path):
    file = written(tmp_path, "01;2\n3;4\n")
    assert all_plain(file, ";", (0, 1), header=True, quoted=False)
    assert not all_plain(file, ";", (0, 1), header=False, quoted=False)
    assert all_plain(file, ";", (1,), header=False, quoted=False)


@pytest.mark.parametrize("name", [*PLAIN, "padded", "plus", "decimal", "text", "minus zero"])
def test_a_table_has_the_ids_of_its_texts(tmp_path, name):
    file = written(tmp_path, {**PLAIN, **OTHERS}[name])
    texts = pd.read_csv(file, dtype=str)
    found = Table("table", Table.Config(path=file)).read()
    for own, places, column in (
        (found.user_ids, found.users, texts["user"]),
        (found.item_ids, found.items, texts["item"]),
    ):
        assert [str(own[place]) for place in places] == column.tolist()
    seen = recognise(file)
    assert (seen.users, seen.items) == (texts["user"].nunique(), texts["item"].nunique())


def test_as_by_a_loop_over_random_tables(tmp_path):
    random = np.random.default_rng(0)
    values = ["1", "20", "007", "0", "-3", "-0", "+1", "1.0", "x", '"5"', '"05"', ""]
    shares = np.array([30, 30, 1, 30, 30, 1, 1, 1, 1, 30, 1, 1]) / 157
    verdicts = set()
    for _ in range(60):
        rows = random.choice(values, (4, 3), p=shares)
        file = written(tmp_path, "a,b,c\n" + "".join(",".join(row) + "\n" for row in rows))
        bare = [value.strip('"') for value in rows[:, [0, 2]].ravel()]
        expected = all(value.lstrip("-").isdecimal() and str(int(value)) == value for value in bare)
        assert all_plain(file, ",", (0, 2), header=True, quoted=True) == expected
        verdicts.add(expected)
    assert verdicts == {True, False}
