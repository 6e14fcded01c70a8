"""The text sets of the paper: Section 4, "Datasets and models".

The MD5 of AG News and of DBpedia's .tar.gz are those torchtext checks; the SHA-256 of its .tgz is
that of the copy that fast.ai serves. The parts are balanced samples of the same rows, for networks
where neither can be had.
"""

from __future__ import annotations

from deltafl.data.text.entry import Edition, RawFile, TextEntry

_CITATION = "Zhang, Zhao and LeCun, Character-level convolutional networks, NeurIPS 2015"
_AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv"
_DBPEDIA = "https://s3.amazonaws.com/fast-ai-nlp"


def _dbpedia(file: RawFile) -> Edition:
    members = ("dbpedia_csv/train.csv", "dbpedia_csv/test.csv")
    # Class, title, content; the part has no titles, so the content alone is the text of both.
    return Edition((file,), 560_000, 70_000, columns=3, text=(2,), members=members)


_ENTRIES = (
    TextEntry(
        name="agnews",
        classes=("World", "Sports", "Business", "Sci/Tech"),
        licence="non-commercial academic use",
        citation=_CITATION,
        editions=(
            Edition(
                (
                    RawFile(
                        "train.csv",
                        "md5:b1a00f826fdfbd249f79597b59e1dc12",
                        f"{_AG_NEWS}/train.csv",
                    ),
                    RawFile(
                        "test.csv",
                        "md5:d52ea96a97a2d943681189a97654912d",
                        f"{_AG_NEWS}/test.csv",
                    ),
                ),
                train=120_000,
                test=7_600,
                columns=3,
                text=(1, 2),
            ),
            Edition(
                (
                    RawFile(
                        "train.csv.gz",
                        "sha256:84e13811633dbd27758a67be670af63fb666b5c45fdb27923ba533d822e1a2e5",
                    ),
                    RawFile(
                        "test.csv.gz",
                        "sha256:7213e029af6bff01840b5021363f704e20ab042c0b34dcb347731681ec0e906f",
                    ),
                ),
                train=71_332,
                test=7_600,
                columns=2,
                text=(1,),
                part="a balanced part of the training set, 71332 of 120000 rows",
            ),
        ),
        folders=("agnews", "ag_news", "ag_news_csv"),
    ),
    TextEntry(
        name="dbpedia",
        classes=(
            "Company",
            "EducationalInstitution",
            "Artist",
            "Athlete",
            "OfficeHolder",
            "MeanOfTransportation",
            "Building",
            "NaturalPlace",
            "Village",
            "Animal",
            "Plant",
            "Album",
            "Film",
            "WrittenWork",
        ),
        licence="CC BY-SA 3.0 and GFDL",
        citation=_CITATION,
        editions=(
            _dbpedia(
                RawFile(
                    "dbpedia_csv.tgz",
                    "sha256:42db5221ddedddb673a4cabcc5f3a7d869714c878bcfe4ba94b29d14aa38e417",
                    f"{_DBPEDIA}/dbpedia_csv.tgz",
                )
            ),
            _dbpedia(RawFile("dbpedia_csv.tar.gz", "md5:dca7b1ae12b1091090db52aa7ec5ca64")),
            Edition(
                (
                    RawFile(
                        "train.csv.gz",
                        "sha256:2d7976bca436ead73e17c29a148498f2fb7f78c5af9bfdb5bd9360acc6aceea8",
                    ),
                    RawFile(
                        "test.csv.gz",
                        "sha256:ad89ad124d0a4e20b6182ea2bfcd6011fe432014fbe70d65897ce0b4eb3a9367",
                    ),
                ),
                train=27_244,
                test=7_000,
                columns=2,
                text=(1,),
                part="balanced parts, 27244 of 560000 training rows and 7000 of 70000 test rows",
            ),
        ),
        folders=("dbpedia", "dbpedia14", "dbpedia_csv"),
    ),
)

TEXTS: dict[str, TextEntry] = {entry.name: entry for entry in _ENTRIES}
"""Every text set by its name."""
