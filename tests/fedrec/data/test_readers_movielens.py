# SPDX-License-Identifier: Apache-2.0
"""The MovieLens readers on small files in the documented formats."""

import numpy as np
import pytest

from fedrec.data.readers._movielens import age_band
from fedrec.data.readers.ml_1m import MovieLens1M
from fedrec.data.readers.ml_20m import MovieLens20M
from fedrec.data.readers.ml_100k import MovieLens100K
from fedrec.errors import DataError


def read(reader, folder):
    return reader("small", reader.Config(path=folder, verify=False)).read()


def labels(feature, row):
    codes = feature.codes[feature.offsets[row] : feature.offsets[row + 1]]
    return [feature.categories[code] for code in codes]


def write_ml_1m(folder, ratings="7::30::5::978300760\n2::10::3::978302109\n7::10::4::978301968\n"):
    (folder / "ratings.dat").write_text(ratings)
    (folder / "users.dat").write_text(
        "2::M::56::16::70072\n5::M::25::15::55117\n7::F::1::10::48067-1234\n"
    )
    films = (
        "10::Café: The Film (1995)::Animation|Children's|Comedy\n20::Unrated (1999)::War\n30::Other"
        " (2000)::Drama\n"
    )
    (folder / "movies.dat").write_bytes(films.encode("latin-1"))
    return folder


def write_ml_100k(folder):
    (folder / "u.data").write_text("3\t1\t4\t881250949\n1\t2\t5\t881250950\n")
    (folder / "u.user").write_text("1|49|F|writer|85711\n3|17|M|student|T8H1N\n")
    lines = ['1|"Toy" Story (1995)|01-Jan-1995||http://x', "2|Café (1994)|||http://y"]
    flags = [["0"] * 19, ["0"] * 19]
    flags[0][3] = flags[0][5] = flags[1][0] = "1"
    text = "".join("|".join([line, *row]) + "\n" for line, row in zip(lines, flags, strict=True))
    (folder / "u.item").write_bytes(text.encode("latin-1"))
    return folder


class TestMovieLens1M:
    def test_rows_keep_the_order_of_the_file(self, tmp_path):
        data = read(MovieLens1M, write_ml_1m(tmp_path))
        assert data.user_ids.tolist() == [2, 7]
        assert data.item_ids.tolist() == [10, 30]
        assert data.users.tolist() == [1, 0, 1]
        assert data.items.tolist() == [1, 0, 0]
        assert data.ratings.tolist() == [5.0, 3.0, 4.0]
        assert data.times.tolist() == [978300760, 978302109, 978301968]

    def test_catalogue_is_the_rated_films_and_the_users_with_ratings(self, tmp_path):
        data = read(MovieLens1M, write_ml_1m(tmp_path))
        assert (data.num_users, data.num_items) == (2, 2)

    def test_features_have_readable_labels(self, tmp_path):
        data = read(MovieLens1M, write_ml_1m(tmp_path))
        assert data.user_features.names == ("gender", "age", "occupation")
        assert [labels(feature, 0) for feature in data.user_features.features] == [
            ["M"],
            ["56+"],
            ["self-employed"],
        ]
        assert [labels(feature, 1) for feature in data.user_features.features] == [
            ["F"],
            ["Under 18"],
            ["K-12 student"],
        ]
        assert labels(data.item_features["genres"], 0) == ["Animation", "Children's", "Comedy"]
        assert labels(data.item_features["genres"], 1) == ["Drama"]

    def test_eras_are_the_two_decades_that_hold_the_year(self, tmp_path):
        folder = write_ml_1m(tmp_path)
        assert read(MovieLens1M, folder).item_features.names == ("genres",)
        data = MovieLens1M("small", MovieLens1M.Config(path=folder, verify=False, eras=True)).read()
        assert labels(data.item_features["eras"], 0) == ["1990-1999", "1995-2004"]
        assert labels(data.item_features["eras"], 1) == ["1995-2004", "2000-2009"]

    def test_titles_are_words_without_the_year(self, tmp_path):
        folder = write_ml_1m(tmp_path)
        config = MovieLens1M.Config(path=folder, verify=False, titles=True)
        reader = MovieLens1M("small", config)
        table = reader.read().item_features
        assert labels(table["title"], 0) == ["café", "film", "the"]
        assert labels(table["title"], 1) == ["other"]
        assert table.names == ("genres",), "a text is no category"
        assert reader.feature_names().item_texts == ("title",)

    def test_a_title_without_a_year_has_no_era(self, tmp_path):
        folder = write_ml_1m(tmp_path)
        (folder / "movies.dat").write_text("10::Film (1995)::War\n30::Other::Drama\n")
        with pytest.raises(DataError, match="without a year"):
            MovieLens1M("small", MovieLens1M.Config(path=folder, verify=False, eras=True)).read()

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("7::30::5", "4 values"),
            ("7::30::5::1::2", "4 values"),
            ("7::x::5::1", "a whole number as 'item'"),
            ("7::30::::1", "a number as 'rating'"),
            ("7::99999999999::5::1", "a whole number as 'item'"),
            ("7::30::nan::1", "a number as 'rating'"),
        ],
    )
    def test_malformed_line_is_named(self, tmp_path, line, expected):
        write_ml_1m(tmp_path, f"7::30::5::978300760\n{line}\n7::10::4::978301968\n")
        with pytest.raises(DataError, match=r"ratings\.dat, line 2") as caught:
            read(MovieLens1M, tmp_path)
        assert expected in caught.value.expected
        assert line in caught.value.got

    def test_malformed_first_line_is_named(self, tmp_path):
        write_ml_1m(tmp_path, "7::30::5::978300760::1\n7::10::4::978301968\n")
        with pytest.raises(DataError, match="line 1:"):
            read(MovieLens1M, tmp_path)

    def test_user_without_a_line_is_refused(self, tmp_path):
        write_ml_1m(tmp_path, "8::30::5::978300760\n")
        with pytest.raises(DataError, match=r"users\.dat: id 8 of the ratings is missing"):
            read(MovieLens1M, tmp_path)

    def test_user_with_two_lines_is_refused(self, tmp_path):
        write_ml_1m(tmp_path)
        (tmp_path / "users.dat").write_text("2::M::56::16::1\n7::F::1::10::1\n7::F::1::10::1\n")
        with pytest.raises(DataError, match="id 7 is given twice"):
            read(MovieLens1M, tmp_path)

    def test_unknown_occupation_is_refused(self, tmp_path):
        write_ml_1m(tmp_path)
        (tmp_path / "users.dat").write_text("2::M::56::21::1\n7::F::1::10::1\n")
        with pytest.raises(DataError, match="unknown occupation"):
            read(MovieLens1M, tmp_path)

    def test_missing_file_is_named(self, tmp_path):
        write_ml_1m(tmp_path)
        (tmp_path / "users.dat").unlink()
        with pytest.raises(DataError, match=r"missing[\s\S]*users\.dat"):
            read(MovieLens1M, tmp_path)

    def test_cut_last_line_is_refused_when_verifying(self, tmp_path):
        write_ml_1m(tmp_path, "7::30::5::978300760\n2::10::3::97830")
        with pytest.raises(DataError, match="cut off") as caught:
            MovieLens1M("ml-1m", MovieLens1M.Config(path=tmp_path)).read()
        assert "1,000,209" in caught.value.expected
        assert "2 lines" in caught.value.got and "2::10::3::97830" in caught.value.got

    def test_wrong_counts_are_refused_when_verifying(self, tmp_path):
        with pytest.raises(DataError, match="number of rows differs") as caught:
            MovieLens1M("ml-1m", MovieLens1M.Config(path=write_ml_1m(tmp_path))).read()
        assert (caught.value.expected, caught.value.got) == ("1,000,209 rows", "3 rows")


class TestMovieLens100K:
    def test_reads_rows_and_features(self, tmp_path):
        data = read(MovieLens100K, write_ml_100k(tmp_path))
        assert data.users.tolist() == [1, 0]
        assert data.items.tolist() == [0, 1]
        assert data.ratings.tolist() == [4.0, 5.0]
        assert [labels(feature, 0) for feature in data.user_features.features] == [
            ["F"],
            ["45-49"],
            ["writer"],
        ]
        assert labels(data.user_features["age"], 1) == ["Under 18"]
        assert labels(data.item_features["genres"], 0) == ["Animation", "Comedy"]
        assert labels(data.item_features["genres"], 1) == ["unknown"]

    @pytest.mark.parametrize(
        ("age", "band"),
        [
            *(
                (7, "Under 18"),
                (17, "Under 18"),
                (18, "18-24"),
                (24, "18-24"),
                (34, "25-34"),
                (44, "35-44"),
            ),
            *((45, "45-49"), (49, "45-49"), (50, "50-55"), (55, "50-55"), (56, "56+"), (73, "56+")),
        ],
    )
    def test_ages_get_the_bands_of_ml_1m(self, age, band):
        assert age_band(age) == band


class TestMovieLens20M:
    def test_reads_rows_and_genres(self, tmp_path):
        (tmp_path / "ratings.csv").write_text(
            "userId,movieId,rating,timestamp\n1,2,3.5,1112486027\n4,131262,0.5,5\n"
        )
        (tmp_path / "movies.csv").write_text(
            'movieId,title,genres\n2,"Café, The (1995)",Adventure|Children\n3,X,Drama\n131262,Y,(no'
            " genres listed)\n",
            encoding="utf-8",
        )
        data = read(MovieLens20M, tmp_path)
        assert data.user_ids.tolist() == [1, 4]
        assert data.item_ids.tolist() == [2, 131262]
        np.testing.assert_array_equal(data.ratings, np.float32([3.5, 0.5]))
        assert data.times.tolist() == [1112486027, 5]
        assert labels(data.item_features["genres"], 0) == ["Adventure", "Children"]
        assert labels(data.item_features["genres"], 1) == []

    def test_missing_column_offers_the_nearest(self, tmp_path):
        (tmp_path / "ratings.csv").write_text(
            "userId,movieID,rating,timestamp\n1,2,3.5,1112486027\n"
        )
        with pytest.raises(DataError, match="no column 'movieId'") as caught:
            read(MovieLens20M, tmp_path)
        assert "did you mean 'movieID'" in caught.value.fix
