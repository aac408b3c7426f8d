"""Decoding of header blocks."""

from __future__ import annotations

import hpack
from hypothesis import given
from hypothesis import strategies as st

from serve_app.http2.hpack_headers import HeaderDecoder
from tests.support.http2_peer import request_fields


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abcdef"), st.text("xyz", max_size=30)), max_size=6), max_size=12
    )
)
def test_cached_heads_follow_changes_of_the_table(calls: list[list[tuple[str, str]]]) -> None:
    encoder, decoder, reference = hpack.Encoder(), HeaderDecoder(65_536), hpack.Decoder()
    for i, headers in enumerate(calls):
        if i == 4:
            encoder.header_table_size = 100
        block = encoder.encode([*request_fields(), *headers])
        expected = {name: value for name, value in reference.decode(block) if name in set("abcdef")}
        assert decoder.decode(block).headers == expected
        if all(byte & 0x80 for byte in block):  # only indexed fields, which do not change the table
            assert decoder.decode(block) is decoder.decode(block)
