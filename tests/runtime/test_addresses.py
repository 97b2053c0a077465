"""Which texts are addresses of a folder in a store."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_compat.errors import ArgumentError
from hf_compat.runtime.addresses import store_address
from hf_compat.runtime.paths import local_path, way_to_path


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("S3://bucket/run/", "s3://bucket/run"),
        ("memory:///run", "memory://run"),
        ("s3a://bucket", "s3a://bucket"),  # known by its package
        ("gcs://b/with\nbreak", "gcs://b/with\nbreak"),
        ("s3://", None),
        ("s3:///", None),
        ("unknown://bucket/run", None),
        ("file:///tmp/run", None),
        ("http://host/run", None),
        ("simplecache://s3/run", None),
        ("dir://run", None),
        ("async_wrapper://run", None),
        ("out/run", None),
        ("C://run", None),
        ("", None),
    ],
)
def test_addresses_of_stores(text, address):
    assert store_address(text) == address


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("/a/run", None),
        ("C:/run", None),
        ("run:/b", None),
        ("s3:/bucket/run", "paths and `normpath` leave one slash of two: write it as the text 's3://bucket/run'"),
        ("file:///a/b%20c", "write it as '/a/b c'"),
        ("local:///a", "write it as '/a'"),
        ("file://localhost/a", "write it as '/a'"),
        ("file://host/a", "it is an address of other storage"),
        ("file://", "it is an address of other storage"),
        ("https://host/a", "it is an address of other storage"),
        ("s3://bucket/run", "it is an address of other storage"),
        ("simplecache::s3://bucket/run", "it is an address of other storage"),
        ("a\0b", "not a path: embedded null"),
        ("a" * 300, "is too long for a path"),
        (3.5, "is not a path.\n\nHint: pass a text or a Path"),
        (None, "is not a path.\n\nHint: pass a text or a Path"),
    ],
)
def test_paths_of_this_machine_and_addresses_of_others(text, way_out):
    if way_out is None:
        assert local_path("it", text) == text and way_to_path(text) == ""
    else:
        with pytest.raises(ArgumentError, match=re.escape(way_out)):
            local_path("it", text)
    assert local_path("it", Path("a")) == local_path("it", b"a") == "a"
