"""Which texts are addresses of a folder in a store."""

from __future__ import annotations

import pytest

from hf_compat.runtime.addresses import store_address


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
