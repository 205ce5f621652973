"""Numbers as text."""

import pytest

from gemctl.units import abbreviated, binary, count, milliseconds, percent, plural, si


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([7], "7"),
        ([0, 1], "0–1"),
        ([4, 5, 6, 7], "4–7"),
        ([0, 8, 16, 24], "0, 8, 16, 24"),
        ([0, 8, 16, 24, 32], "0, 8, … 32"),
        ([0, 1, 5], "0, 1, 5"),
        ([0, 1, 5, 6, 9], "0, 1, 5, … (5)"),
    ],
)
def test_lists_of_numbers_are_abbreviated(numbers: list[int], text: str) -> None:
    assert abbreviated(numbers) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (si(999.0), "999"),
        (si(1000.0), "1 k"),
        (si(2.868e6), "2.87 M"),
        (si(-1.5e9), "-1.5 G"),
        (si(3.2e12), "3.2 T"),
        (si(1e15), "1 P"),
        (binary(1023), "1023 B"),
        (binary(1024), "1.0 KiB"),
        (binary(1536 * 2**20), "1.5 GiB"),
        (binary(2**40), "1.0 TiB"),
        (percent(0.747), "74.7%"),
        (milliseconds(0.0125), "12.50"),
        (count(1234567.9), "1,234,567"),
        (plural(1, "host"), "1 host"),
        (plural(2048, "host"), "2,048 hosts"),
        (plural(2, "class", "classes"), "2 classes"),
        (si(None), "–"),
        (binary(None), "–"),
    ],
)
def test_numbers_have_units_and_unknown_ones_are_a_dash(text: str, expected: str) -> None:
    assert text == expected
