from h5feed.bench.tables import markdown_table, text_table

HEADS, ROWS = ["who", "n"], [["a", "1,000"], ["longer", "2"]]
ROWS3 = [["a", "0.5", "1"], ["longer", "10.0", "2"]]


def test_words_to_the_left_and_numbers_to_the_right():
    assert text_table(HEADS, ROWS, {0}) == [
        "who         n",
        "──────  ─────",
        "a       1,000",
        "longer      2",
    ]


def test_heads_wider_than_their_columns_stand_in_two_lines():
    assert text_table(["who", "1st batch s", "n"], ROWS3, {0}) == [
        "            1st",
        "who     batch s  n",
        "──────  ───────  ─",
        "a           0.5  1",
        "longer     10.0  2",
    ]
    assert text_table(["who", "in s", "n"], ROWS3, {0})[0] == "who     in s  n"


def test_markdown_says_the_same():
    assert markdown_table(HEADS, ROWS, {0}) == [
        "| who | n |",
        "| --- | ---: |",
        "| a | 1,000 |",
        "| longer | 2 |",
    ]
