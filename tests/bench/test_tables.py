from h5feed.bench.tables import markdown_table, text_table

HEADS, ROWS = ["who", "n"], [["a", "1,000"], ["longer", "2"]]


def test_words_to_the_left_and_numbers_to_the_right():
    assert text_table(HEADS, ROWS, {0}) == [
        "who         n",
        "──────  ─────",
        "a       1,000",
        "longer      2",
    ]


def test_markdown_says_the_same():
    assert markdown_table(HEADS, ROWS, {0}) == [
        "| who | n |",
        "| --- | ---: |",
        "| a | 1,000 |",
        "| longer | 2 |",
    ]
