"""The grammar of selectors, globs, and what they name in a catalog."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.models.catalog.catalog import Call, CallBoundary, Catalog, Layer, TensorInfo
from layertap.models.errors import SelectorError, UnknownLayerError
from layertap.models.plan.matches import filter_layers, find_matches
from layertap.models.plan.plan import Tap
from layertap.models.plan.requested import Selector
from layertap.models.plan.selectors import MAX_TEXT, parse_selector, split_call
from layertap.models.points import SITES, format_path

GOOD = {  # layer, call, function, its number, path, site
    "layer4": ("layer4", None, None, None, None, "output"),
    ".:input": (".", None, None, None, None, "input"),
    "relu#-1": ("relu", -1, None, None, None, "output"),
    "relu#*": ("relu", "*", None, None, None, "output"),
    "encoder[out][0]:input": ("encoder", None, None, None, ("out", "0"), "input"),
    "x[a:b]": ("x", None, None, None, ("a:b",), "output"),
    "a[0]:attention_grad": ("a", None, None, None, ("0",), "attention_grad"),
    "größe": ("größe", None, None, None, None, "output"),
    "(?!x)|.^$\\": ("(?!x)|.^$\\", None, None, None, None, "output"),
    "layer1.0#1/add#-1[0]:input": ("layer1.0", 1, "add", -1, ("0",), "input"),
    "./cat": (".", None, "cat", None, None, "output"),
    "*#*/relu#*": ("*", "*", "relu", "*", None, "output"),
    "a/b/c": ("a/b", None, "c", None, None, "output"),
    "a/b.c": ("a/b.c", None, None, None, None, "output"),
    "a/": ("a/", None, None, None, None, "output"),
}
BAD = {
    "": "1 to 512 characters",
    "x" * (MAX_TEXT + 1): "this one has 513",
    "#0": "names no layer",
    "a#x": "is no call number",
    "a#²": "is no call number",
    "a#1#2": "is no call number",
    "a#1234567": "is no call number",
    "a[0": "is not closed",
    "a[0]x": "is not closed",
    "a[]": "is malformed",
    "a[0]]": "is malformed",
    "a:outputs": "is no site",
    "a/b#": "is no call number",
    "#0/b": "names no layer",
}


@pytest.mark.parametrize("text", GOOD)
def test_good_texts(text: str) -> None:
    """Every part of the grammar is read, and nothing else is special: a slash that no name follows is the layer's."""
    selector = parse_selector(text)
    function = split_call(selector.function) if selector.function else (None, None)
    assert (selector.pattern, selector.call, *function, selector.path, selector.site) == GOOD[text]
    assert (selector.text, selector.type) == (text, None)


@pytest.mark.parametrize("text", BAD)
def test_bad_texts(text: str) -> None:
    """What does not fit the grammar is refused with what is wrong and, cut and escaped, what was written."""
    with pytest.raises(SelectorError, match=re.escape(BAD[text])) as caught:
        parse_selector(text)
    assert len(caught.value.detail) < 200
    assert caught.value.hint


def test_site_before_path() -> None:
    """A selector whose site stands before its path is refused with what to type."""
    with pytest.raises(SelectorError, match="the site stands before the path") as caught:
        parse_selector("block?:grad_output[out][0]")
    assert caught.value.hint == "write 'block?[out][0]:grad_output'"


names = st.text(st.characters(exclude_characters="#[]:*?/", exclude_categories=["Cs"]), min_size=1, max_size=20)
keys = st.text(st.characters(exclude_characters="[]", exclude_categories=["Cs"]), min_size=1, max_size=8)
calls = st.none() | st.just("*") | st.integers(-99999, 999999)
paths = st.none() | st.lists(keys, min_size=1, max_size=3).map(tuple)


@given(names, calls, paths, st.sampled_from(["", ":output", ":input"]))
def test_round_trip(name: str, call: int | str | None, path: tuple[str, ...] | None, site: str) -> None:
    """What is put together by the grammar is taken apart into the same parts."""
    text = name + ("" if call is None else f"#{call}") + format_path(path or ()) + site
    selector = parse_selector(text)
    assert (selector.pattern, selector.call, selector.path) == (name, call, path)
    assert selector.site == (site[1:] or "output")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text does anything but give a selector or a SelectorError."""
    try:
        read = parse_selector(text).pattern
    except SelectorError as error:
        read = error.detail
    assert read


def info(*path: str) -> TensorInfo:
    return TensorInfo(path, (1, 4), "float32", layout="NC")


def layer(name: str, kind: str, *calls: tuple[TensorInfo, ...]) -> Layer:
    runs = tuple(
        Call(CallBoundary(2 * k, 0.0, (info(),)), CallBoundary(2 * k + 1, 0.0, out)) for k, out in enumerate(calls)
    )
    return Layer(name, kind, True, 0, runs, ())


CATALOG = Catalog(
    {
        item.name: item
        for item in (
            layer(".", "Net", (info("out"), info("aux", "0"), info("aux", "1"))),
            layer("conv1", "Conv2d", (info(),)),
            layer("block.conv2", "Conv2d", (info(),)),
            layer("block.relu", "ReLU", (info(),), (info(),), (info(),)),
            layer("block", "Block", (info("0"), info("1"))),
            layer("empty", "Nothing", ()),
            layer("silent", "Linear"),
            layer("head.silent", "Linear"),
        )
    },
    0.1,
    True,
)


@pytest.mark.parametrize(("glob", "names"), [("*conv?", ["conv1", "block.conv2"]), ("[bc]onv1", []), ("", [])])
def test_globs(glob: str, names: list[str]) -> None:
    """Of wildcards there are only * and ?."""
    assert [each.name for each in filter_layers(CATALOG, glob, None, None)] == names


def test_a_glob_that_would_blow_up_a_regular_expression() -> None:
    """Many stars against a long name that does not fit take at most length times length steps."""
    catalog = Catalog({"a" * 2000: layer("a" * 2000, "Linear", (info(),))}, 0.1, True)
    assert not filter_layers(catalog, "*a" * 200 + "b", None, None)
    assert filter_layers(catalog, "*" * 500, None, None)


def found(text: str, **fields: object) -> list[Tap]:
    selector = parse_selector(text)
    return find_matches(Selector(**{**vars(selector), **fields}), CATALOG)[0]


@pytest.mark.parametrize(
    ("text", "detail", "hint"),
    [
        ("conv3", "there is no layer 'conv3'", "conv1"),
        ("head.silent", "never runs in a forward", "ask for its parent 'head'"),
        ("*silent", "matches 2 layers, none of which runs", ""),
        ("nothing*", "matches no layer", "lists every layer"),
        ("conv1[0]", "is a single tensor", "leave the path out"),
        ("block[2]", "has nothing at '[2]'", "[0], [1]"),
        ("empty", "holds no tensor", ""),
        ("*#7", "matches", ""),
    ],
)
def test_what_is_not_there(text: str, detail: str, hint: str) -> None:
    """Whatever names nothing is refused with what there is, be it a name, a glob, a call or a path."""
    with pytest.raises(UnknownLayerError, match=re.escape(detail)) as caught:
        found(text)
    assert hint in caught.value.hint


ROOT = Path(__file__).parents[3]
EXAMPLES = [path for path in (ROOT / "examples").iterdir() if path.suffix in (".md", ".py", ".sh")]
WRITTEN = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *EXAMPLES]
IN_QUOTES = re.compile(rf"""[`"']([^`"'\s]+(?::(?:{"|".join(SITES)})|#[-\d*]+)[^`"'\s]*)[`"']""")
IN_QUERY = re.compile(r"""[?&`](?:layers?|resume)=([^&'"`\s]+)""")


def test_documents() -> None:
    """Every selector that the documents and examples show fits the grammar."""
    shown: set[str] = set()
    for path in WRITTEN:
        text = path.read_text(encoding="utf-8")
        shown |= {each for each in IN_QUOTES.findall(text) if "/" not in each}
        queries = [unquote(query) for query in IN_QUERY.findall(text)]
        shown |= {name for query in queries if not query.startswith("[") for name in query.split(",")}  # not JSON
    assert shown >= {".[attention_mask]:input", "head:input", "block2.relu#0", "pool"}
    for text in shown:
        parse_selector(text)
