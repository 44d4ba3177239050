# SPDX-License-Identifier: Apache-2.0
"""Frappe, Gowalla and the Amazon readers on small files in the documented formats."""

import gzip
import json

import pytest

from fedrec.data.readers.amazon.amazon_5core import Amazon5Core
from fedrec.data.readers.amazon.amazon_upc import AmazonUpc
from fedrec.data.readers.amazon.amazon_video import AmazonVideo
from fedrec.data.readers.amazon.beauty import Beauty
from fedrec.data.readers.frappe import Frappe
from fedrec.data.readers.gowalla import Gowalla
from fedrec.errors import DataError

FRAPPE = """user\titem\tcnt\tdaytime\tweekday\tisweekend\thomework\tcost\tweather\tcountry\tcity
3\t9\t1\tmorning\tsunday\tweekend\tunknown\tfree\tsunny\tSpain\t0
0\t9\t4\tnight\tmonday\tworkday\thome\tfree\tcloudy\tUnited States\t5
3\t2\t2\tevening\tsunday\tweekend\tunknown\tpaid\tsunny\tSpain\t0
3\t9\t5\tmorning\tfriday\tworkday\twork\tpaid\trainy\tSpain\t0
"""


def read(reader, folder, **settings):
    return reader("small", reader.Config(path=folder, verify=False, **settings)).read()


def label(feature, row):
    return [feature.categories[code] for code in feature.padded()[row] if code >= 0]


class TestFrappe:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "frappe.csv").write_text(FRAPPE)
        return tmp_path

    def test_rows_keep_each_usage(self, folder):
        data = read(Frappe, folder)
        assert data.user_ids.tolist() == [0, 3]
        assert data.item_ids.tolist() == [2, 9]
        assert data.users.tolist() == [1, 0, 1, 1]
        assert data.items.tolist() == [1, 1, 0, 1]
        assert data.ratings.tolist() == [1.0, 4.0, 2.0, 5.0]
        assert data.times is None

    def test_pairs_sum_the_counts_where_the_pair_first_stood(self, folder):
        data = read(Frappe, folder, unit="pairs")
        assert data.users.tolist() == [1, 0, 1]
        assert data.items.tolist() == [1, 1, 0]
        assert data.ratings.tolist() == [6.0, 4.0, 2.0]

    def test_user_features_are_the_most_frequent_values(self, folder):
        features = read(Frappe, folder).user_features
        assert features.names == (
            "daytime",
            "weekday",
            "isweekend",
            "homework",
            "weather",
            "country",
            "city",
        )
        assert [label(feature, 1) for feature in features.features] == [
            *(["morning"], ["sunday"], ["weekend"], ["unknown"], ["sunny"], ["Spain"], ["0"])
        ]

    def test_of_equally_frequent_values_the_first_in_the_alphabet_counts(self, folder):
        # App 9 is free in two rows and paid in one; app 2 only paid. A fourth row for app 9 makes
        # it a tie.
        with (folder / "frappe.csv").open("a") as file:
            file.write("0\t9\t4\tnight\tmonday\tworkday\thome\tpaid\tcloudy\tUnited States\t5\n")
        cost = read(Frappe, folder).item_features["cost"]
        assert (label(cost, 0), label(cost, 1)) == (["paid"], ["free"])

    def test_categories_come_from_meta(self, folder):
        assert read(Frappe, folder).item_features.names == ("cost",)
        (folder / "meta.csv").write_text(
            'item\tpackage\tcategory\tname\n9\tcom.x\tTools\t"It\'s\ta tab"\n7\tb\tGames\tc\n'
        )
        category = read(Frappe, folder).item_features["category"]
        assert (label(category, 0), label(category, 1)) == ([], ["Tools"])


class TestGowalla:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "train.txt").write_text("0 5 2\n1 5\n3 8 2 5 \n")
        (tmp_path / "test.txt").write_text("0 8\n1 \n3 9\n")
        return tmp_path

    @pytest.mark.parametrize(
        ("part", "users", "items"),
        [
            ("all", [0, 0, 1, 2, 2, 2, 0, 2], [1, 0, 1, 2, 0, 1, 2, 3]),
            ("train", [0, 0, 1, 2, 2, 2], [1, 0, 1, 2, 0, 1]),
            ("test", [0, 2], [2, 3]),
        ],
    )
    def test_parts_share_users_and_items(self, folder, part, users, items):
        data = read(Gowalla, folder, part=part)
        assert data.user_ids.tolist() == [0, 1, 3]
        assert data.item_ids.tolist() == [2, 5, 8, 9]
        assert (data.users.tolist(), data.items.tolist()) == (users, items)
        assert data.ratings is None and data.times is None

    @pytest.mark.parametrize("line", ["1 5x", "1,5", "1 -5", "user 5"])
    def test_malformed_line_is_named(self, folder, line):
        (folder / "train.txt").write_text(f"0 5 2\n{line}\n3 8\n")
        with pytest.raises(DataError, match=r"train\.txt, line 2") as caught:
            read(Gowalla, folder)
        assert caught.value.got == repr(line)

    def test_empty_part(self, folder):
        (folder / "test.txt").write_text("")
        assert len(read(Gowalla, folder, part="test")) == 0


class TestAmazonUpc:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "train.csv").write_bytes(
            b"itemID,userID,reviewerID,asin\r\n4,0,A2,B00\r\n1,2,A3,B01\r\n"
        )
        (tmp_path / "test.csv").write_bytes(b"itemID,userID,reviewerID,asin\r\n6,0,A2,B02\r\n")
        return tmp_path

    @pytest.mark.parametrize(
        ("part", "users", "items"),
        [("all", [0, 1, 0], [1, 0, 2]), ("train", [0, 1], [1, 0]), ("test", [0], [2])],
    )
    def test_parts_share_users_and_items(self, folder, part, users, items):
        data = read(AmazonUpc, folder, part=part)
        assert (data.num_users, data.num_items) == (2, 3)
        assert (data.users.tolist(), data.items.tolist()) == (users, items)

    def test_default_folder_is_office(self, monkeypatch, tmp_path):
        monkeypatch.setenv("FEDREC_DATA", str(tmp_path))
        assert AmazonUpc("amazon-upc", AmazonUpc.Config()).default_folder() == tmp_path / "office"


class TestAmazon5Core:
    REVIEWS = (
        {
            "reviewerID": "A2",
            "asin": "B1",
            "overall": 5.0,
            "unixReviewTime": 1367193600,
            "reviewText": "é",
        },
        {"reviewerID": "A1", "asin": "B1", "overall": 2, "unixReviewTime": 1363392000},
        {"reviewerID": "A2", "asin": "B0", "overall": 4.0, "unixReviewTime": 1363392001},
    )

    def write(self, path):
        text = "".join(json.dumps(review) + "\n" for review in self.REVIEWS).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    @pytest.mark.parametrize("name", ["Office_5.json", "Office_5.json.gz"])
    @pytest.mark.parametrize("whole_folder", [True, False])
    def test_reads_plain_and_compressed_lines(self, tmp_path, name, whole_folder):
        path = self.write(tmp_path / name)
        data = read(Amazon5Core, tmp_path if whole_folder else path)
        assert data.user_ids.tolist() == ["A1", "A2"]
        assert data.item_ids.tolist() == ["B0", "B1"]
        assert data.users.tolist() == [1, 0, 1]
        assert data.items.tolist() == [1, 1, 0]
        assert data.ratings.tolist() == [5.0, 2.0, 4.0]
        assert data.times.tolist() == [1367193600, 1363392000, 1363392001]

    @pytest.mark.parametrize(
        "line",
        [
            '{"reviewerID": "A2"}',
            "{'reviewerID': 'A2'}",
            '{"revi',
            "[1]",
            '{"reviewerID": ["A2"], "asin": "B1", "overall": 2, "unixReviewTime": 3}',
        ],
    )
    def test_malformed_line_is_named(self, tmp_path, line):
        path = self.write(tmp_path / "x.json")
        path.write_text(path.read_text() + line + "\n")
        with pytest.raises(DataError, match=r"x\.json, line 4") as caught:
            read(Amazon5Core, tmp_path)
        assert caught.value.got == repr(line)

    def test_cut_gzip_is_refused(self, tmp_path):
        path = self.write(tmp_path / "x.json.gz")
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match="damaged"):
            read(Amazon5Core, tmp_path)

    def test_two_categories_need_a_path(self, tmp_path):
        self.write(tmp_path / "a.json")
        self.write(tmp_path / "b.json.gz")
        with pytest.raises(DataError, match="one file of reviews") as caught:
            read(Amazon5Core, tmp_path)
        assert caught.value.got == "a.json, b.json.gz"


class TestOrdered:
    def test_amazon_video_keeps_ratings_and_times(self, tmp_path):
        (tmp_path / "ratings.dat").write_text("b,X,5.0,86400\na,Y,2.0,0\nb,Y,3.0,172800\n")
        data = read(AmazonVideo, tmp_path)
        assert data.user_ids.tolist() == ["a", "b"] and data.item_ids.tolist() == ["X", "Y"]
        assert data.users.tolist() == [1, 0, 1] and data.items.tolist() == [0, 1, 1]
        assert data.ratings.tolist() == [5.0, 2.0, 3.0]
        assert data.times.tolist() == [86400, 0, 172800]

    def test_rows_of_beauty_are_in_the_order_of_the_file(self, tmp_path):
        (tmp_path / "beauty.txt").write_text("1 7\n1 3\n2 7\n")
        data = read(Beauty, tmp_path)
        assert data.users.tolist() == [0, 0, 1] and data.items.tolist() == [1, 0, 1]
        assert data.times.tolist() == [0, 1, 2] and data.ratings is None

    @pytest.mark.parametrize("line", ["a,X,5.0", "a,X,many,0", "a,X,5.0,0,1"])
    def test_a_malformed_line_is_named(self, tmp_path, line):
        (tmp_path / "ratings.dat").write_text(f"b,X,5.0,86400\n{line}\n")
        with pytest.raises(DataError, match=r"ratings\.dat"):
            read(AmazonVideo, tmp_path)
