"""The grammar and the units."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import RequestError
from offbeat.number_format import format_rate, format_seconds, format_size
from offbeat.spec import (
    Param,
    Spec,
    bind,
    count_of,
    expand,
    parse,
    parse_count,
    parse_rate,
    parse_seconds,
    parse_shape,
    parse_size,
)

names = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
words = st.from_regex(r"[^\s,=]{1,8}", fullmatch=True)


@given(names, st.lists(words), st.dictionaries(words, words))
def test_what_is_formatted_is_parsed_back(name: str, args: list[str], options: dict[str, str]) -> None:
    spec = Spec(name=name, args=tuple(args), options=tuple(options.items()))
    assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("ring", Spec(name="ring")),
        (" torus:4x8 ", Spec(name="torus", args=("4x8",))),
        ("h:4x8, leader, outer=ring", Spec(name="h", args=("4x8", "leader"), options=(("outer", "ring"),))),
    ],
)
def test_a_line_is_read(text: str, spec: Spec) -> None:
    assert parse(text) == spec


@pytest.mark.parametrize("text", ["", ":", "Ring", "ring:", "ring:,", "a:k=", "a:=v", "a:k=1,k=2", "a:k=v,arg", "a b"])
def test_a_broken_line_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse(text)


PARAMS = (
    Param(name="shape", read=parse_shape, positional=True, required=True, help="the sides"),
    Param(name="per-tree", read=parse_count, default=16, help="chunks"),
)


def test_bind_reads_arguments_and_options_by_their_python_names() -> None:
    assert bind(parse("x:4x2,per-tree=3"), PARAMS) == {"shape": (4, 2), "per_tree": 3}
    assert bind(parse("x:4x2"), PARAMS) == {"shape": (4, 2), "per_tree": 16}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "SHAPE is missing"),
        ("x:4x2,7", "got '7' as well"),
        ("x:4x2,per-tre=3", "did you mean 'per-tree'"),
        ("x:4x2,per-tree=0", "per-tree: expected a whole number"),
        ("x:4y2", "shape: a shape is"),
    ],
)
def test_bind_names_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        bind(parse(text), PARAMS)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("100MB", 10**8),
        ("64MiB", 64 * 2**20),
        ("1.5kB", 1500),
        ("2.3GB", 2_300_000_000),
        ("1 TB", 10**12),
        ("25.6Mparams", 102_400_000),
        ("25.6M parameters", 102_400_000),
        ("7B params", 28 * 10**9),
        ("3params", 12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["-3", "", "MB", "1.5", "3XB", "3mb", "1e999", "nan", "1_000", "١٢", "25.6M", "7G", "7B", "params"]
)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("10Gbit/s", 1.25e9), ("10GB/s", 1e10), ("10Gb/s", 1.25e9), ("10Gbps", 1.25e9), ("1MiB/s", 2.0**20), ("5", 5.0)],
)
def test_bits_and_bytes_per_second_are_different_things(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "seconds"), [("4us", 4e-6), ("1.5ms", 1.5e-3), ("2min", 120), ("0", 0), ("3 s", 3)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize("text", ["-1ms", "1 fortnight", "soon"])
def test_what_is_not_a_time_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["0GB/s", "-1GB/s", "1GB"])
def test_what_is_not_a_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_rate(text)


@given(st.integers(0, 10**15))
def test_a_formatted_size_is_close_when_read_again(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=1e-3, abs=1)


@given(st.floats(1.0, 1e6))
def test_formatted_times_and_rates_are_close_when_read_again(value: float) -> None:
    assert parse_seconds(format_seconds(value)) == pytest.approx(value, rel=1e-3)
    assert parse_rate(format_rate(value)) == pytest.approx(value, rel=1e-3)


def test_counts_have_their_plural() -> None:
    assert [count_of(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


def test_a_range_stands_for_a_line_of_each() -> None:
    assert expand("k-sync:2..4") == ["k-sync:2", "k-sync:3", "k-sync:4"]
    assert expand("async") == ["async"] and expand("k-sync:3..3") == ["k-sync:3"]
    assert expand("downpour:push=1..2,fetch=3..4") == [
        "downpour:push=1,fetch=3", "downpour:push=1,fetch=4", "downpour:push=2,fetch=3", "downpour:push=2,fetch=4",
    ]  # fmt: skip
    assert expand("grace-sync:1..2,grace=0.5s") == ["grace-sync:1,grace=0.5s", "grace-sync:2,grace=0.5s"]
    with pytest.raises(RequestError, match=r"expected an increasing range, like 1\.\.3; got '3\.\.1'"):
        expand("k-sync:3..1")
    with pytest.raises(RequestError, match="more than 1000 values"):
        expand("downpour:push=1..40,fetch=1..40")
