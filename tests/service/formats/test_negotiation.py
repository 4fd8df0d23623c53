from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.service.errors import NotAcceptableError
from layertap.service.formats import negotiation
from layertap.service.formats.table import FORMATS, ReplyFormat


def negotiate(accept: str | None, name: str | None, formats: dict[str, ReplyFormat]) -> ReplyFormat:
    return formats[negotiation.negotiate(accept, name, {key: each.media_type for key, each in formats.items()})]


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "json"),
        ("", "json"),
        ("*/*", "json"),
        ("application/*", "json"),
        ("  application/x-npz  ;  q=0.5 ", "npz"),
        ("application/x-npz;Q=0.5, application/json;q=0.4", "npz"),
        ("application/x-npz, */*", "npz"),
        ("application/x-npz, */*;q=0.1", "npz"),
        ("application/json;q=0, */*", "npy"),
        ("application/*;q=0.2, application/x-safetensors;q=0.1, text/*", "json"),
        ("text/html, application/xhtml+xml, application/xml;q=0.9, image/png, */*;q=0.8", "png"),
        ("application/json, text/plain, */*", "json"),
        ("image/*", "png"),
        ("text/html, application/x-npz;q=0.001", "npz"),
        ("application/json;q=high, application/x-npz;q=0.1", "npz"),
        ("application/json;q=0.1, application/x-npz;q=0.2, application/json;q=0.3", "json"),
        (";;;=,/,application/x-npz", "npz"),
    ],
)
def test_accept(accept: str | None, expected: str) -> None:
    """The format is the best one by quality, then by how exactly it was named, then by the table's order."""
    assert negotiate(accept, None, FORMATS).name == expected


@pytest.mark.parametrize(
    "accept",
    [
        "text/html",
        "application/json;q=0",
        "application/*;q=0.0, text/html",
        "*",
        "*/json",
        "application/json;q=-1",
        "\x00é",
    ],
)
def test_accept_refused(accept: str) -> None:
    """Where nothing on offer is accepted, every media type on offer is named."""
    with pytest.raises(NotAcceptableError) as caught:
        negotiate(accept, None, FORMATS)
    assert all(each.media_type in caught.value.hint for each in FORMATS.values())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("accept", [None, "text/html", "application/json;q=0"])
def test_format(name: str, accept: str | None) -> None:
    """A format asked for by name is given, whatever Accept says."""
    assert negotiate(accept, name, FORMATS) is FORMATS[name]


@pytest.mark.parametrize("name", ["", "JSON", "application/json", "gif", "x" * 10_000, "__class__", "\x00"])
def test_format_refused(name: str) -> None:
    """An unknown name is refused with the names there are, and is itself cut and escaped."""
    with pytest.raises(NotAcceptableError) as caught:
        negotiate(None, name, FORMATS)
    assert "json, npy, npz, safetensors" in caught.value.hint
    assert len(caught.value.detail) < 150
    assert caught.value.detail.isprintable()


RANGES = ["*/*", "application/*", "image/*", "text/html", *(each.media_type for each in FORMATS.values())]


@given(st.dictionaries(st.sampled_from(RANGES), st.integers(0, 10), min_size=1))
def test_accept_by_quality(qualities: dict[str, int]) -> None:
    """The format is one of those that the header likes best, each as the range that names it most exactly says."""

    def liked(media_type: str) -> int:
        ranges = (media_type, media_type.partition("/")[0] + "/*", "*/*")
        return next((qualities[each] for each in ranges if each in qualities), 0)

    accept = ", ".join(f"{name};q={quality / 10}" for name, quality in qualities.items())
    best = max(liked(each.media_type) for each in FORMATS.values())
    if best == 0:
        with pytest.raises(NotAcceptableError):
            negotiate(accept, None, FORMATS)
    else:
        assert liked(negotiate(accept, None, FORMATS).media_type) == best
