"""Cases of values: what a handler is given, and what it returns."""

from __future__ import annotations

import gzip

from tests.torchserve_cases.case import Case, Request, ask, form
from tests.torchserve_cases.payloads import make_array
from tests.torchserve_cases.python_cases import each

JSON = {"Content-Type": "application/json"}
TYPES = (
    "{k: [type(v).__name__, v.decode('latin-1') if isinstance(v, (bytes, bytearray)) else v]"
    " for k, v in row.items()}"
)


def returns(name: str, expression: str, before: str = "", *requests: Request, difference: str = "") -> Case:
    """Return a case whose handler returns the value of an expression of ``data``."""
    source = f"{before}\n\ndef handle(data, ctx):\n    return None if data is None else {expression}\n"
    return Case(f"returns_{name}", source, requests or (Request(),), difference=difference)


def part(disposition: str, value: str, content_type: str = "") -> bytes:
    """Return a part of a form: its headers and its value."""
    kind = f"Content-Type: {content_type}\r\n" if content_type else ""
    return f"Content-Disposition: form-data; {disposition}\r\n{kind}\r\n{value}".encode()


GIVEN_CASES = (
    Case(
        "integers",
        each("[type(row['body']['id']).__name__, str(row['body']['id'])]"),
        tuple(
            Request(b'{"id": %s}' % number, JSON)
            for number in (
                b"123456789012345678901234",
                b"-9223372036854775809",
                b"18446744073709551615",
                b"18446744073709551616",
                b"1e400",
                b"-0",
                b"1.0",
                b"[99999999999999999999, 1]",
            )
        ),
    ),
    Case(
        "key_order_and_duplicates",
        each("[list(row['body']), row['body'].get('a')]"),
        (Request(b'{"b": 1, "a": 2, "c": 3, "a": 4}', JSON),),
    ),
    Case("not_a_number", each("str(row['body'])"), (Request(b"[NaN, Infinity, -Infinity]", JSON),)),
    Case(
        "bodies",
        each(TYPES),
        (
            Request(b"plain"),
            Request(b"text", {"Content-Type": "text/plain"}),
            Request("größe".encode(), {"Content-Type": "text/plain; charset=utf-8"}),
            Request("größe".encode("latin-1"), {"Content-Type": "text/plain; charset=iso-8859-1"}),
            Request(b'{"a": 1}', {"Content-Type": "application/json; charset=utf-8"}),
            Request(b"{broken", JSON),
            Request(b"\xef\xbb\xbf[1]", JSON),
            Request(b"a=1&b=2&a=3", {"Content-Type": "application/x-www-form-urlencoded"}),
            Request(b"\x00\xff", {"Content-Type": "application/octet-stream"}),
            Request(b""),
            Request(b"", JSON),
            Request(b"x", suffix="?a=1&b=two"),
            Request(b"", suffix="?data=7", method="GET"),
        ),
    ),
    Case(
        "media_type_in_capitals",
        each(TYPES),
        (Request(b'{"a": 1}', {"Content-Type": "Application/JSON"}),),
        difference="Media types are read in any case (RFC 9110, section 8.3.1), and not by TorchServe.",
    ),
    Case(
        "forms",
        each(TYPES),
        (
            form(
                [
                    part('name="meta"', '{"a":1}', "application/json"),
                    part('name="doc"; filename="x.json"', '{"b":2}', "application/json"),
                    part('name="画像"; filename="画.png"', "PNG", "image/png"),
                ]
            ),
            form(
                [
                    part('name="a"', "first"),
                    part('name="a"', "second"),
                    part('name="empty"; filename="e"', ""),
                    part('name="lines"', "one\r\ntwo\n"),
                    part('name="note"; filename="n.txt"', "hi", "text/plain"),
                ]
            ),
        ),
    ),
    Case(
        "header_spelling",
        each(
            "{'all': ctx.get_all_request_header(i)['X-Api-Key'],"
            " 'properties': ctx.request_processor[i].get_request_properties().get('X-Api-Key'),"
            " 'property': ctx.get_request_header(i, 'X-Api-Key'),"
            " 'count': [k.lower() for k in ctx.get_all_request_header(i)].count('x-api-key')}"
        ),
        (Request(b"1", {"X-Api-Key": "abc"}),),
    ),
    Case(
        "configuration_keys",
        each("ctx.model_yaml_config"),
        config={
            "minWorkers": 1,
            "retries": 3,
            "log_level": "info",
            "samples": 100,
            "threads": 0,
            "pin": 1234,
            "profile": "fast",
            "pool": "mean ing",
            "task": ["a", "b"],
            "signature": "serving_default",
            "capture": "everything",
            "batch_size": 8,
            "handlers": ["a"],
            "parameter": 1,
            "sample": "x.json",
            "nested": {"deep": [1, {"x": None}]},
        },
    ),
    Case("version_with_build", each("'built'"), (Request(), Request(suffix="/1.0-rc1")), version="1.0-rc1"),
    Case(
        "version_with_plus",
        each("'plus'"),
        (Request(), Request(suffix="/1.0%2Bcu118"), Request(suffix="/1.0+cu118")),
        version="1.0+cu118",
    ),
    Case(
        "body_of_two_lists", each("[len(row['body']), row['body'][1]]"), (ask([[1], [2]]), ask([1.5, None]))
    ),
    Case("percent_in_the_body", each("row['body'].decode()"), (Request(b"100%25 a+b&c=d"),)),
    Case(
        "url_encoded_form",
        each("{k: v.decode() if hasattr(v, 'decode') else v for k, v in row.items()}"),
        (Request(b"data=a%20b&n=1", {"Content-Type": "application/x-www-form-urlencoded"}),),
    ),
    Case("query_beside_a_body", each("sorted(row)"), (Request(suffix="?data=x&k=2"),)),
    Case(
        "empty_body", each("{k: str(v) for k, v in row.items()}"), (Request(b""), Request(b"", method="GET"))
    ),
    Case(
        "thousand_lines",
        each("len(row['body'].decode().splitlines())"),
        (Request(b"line\n" * 1000, {"Content-Type": "application/octet-stream"}),),
    ),
    Case(
        "text_of_a_python_literal",
        each("sum(ast.literal_eval(row['body'].decode())['values'])", "import ast"),
        (Request(b"{'keys': ('a', 'b'), 'values': [1, 2]}"),),
    ),
    Case(
        "samples_in_json",
        each(
            "np.asarray(row['body']['samples'], np.int16).astype(np.float32).mean().item()",
            "import numpy as np",
        ),
        (ask({"samples": [1, -2, 32767, -32768]}),),
    ),
    Case(
        "array_file",
        each("np.load(io.BytesIO(row['body'])).sum(0).tolist()", "import io\nimport numpy as np"),
        (Request(make_array(), {"Content-Type": "application/x-npy"}),),
    ),
    Case(
        "compressed_body",
        each("gzip.decompress(row['body']).decode()", "import gzip"),
        (Request(gzip.compress(b"hello", mtime=0), {"Content-Type": "application/octet-stream"}),),
    ),
)

RETURN_CASES = (
    returns("a_tuple", "tuple([1])"),
    returns("a_generator", "(x for x in [1])"),
    returns("a_dict", "{'a': 1}"),
    returns("text_for_the_batch", "'x'"),
    returns("nothing", "None"),
    returns("too_many", "[1, 2]"),
    returns("too_few", "[]"),
    returns("none_of_a_row", "[None]"),
    returns("bytes", "[b'raw']"),
    returns("a_bytearray", "[bytearray(b'raw')]"),
    returns("list_of_bytes", "[[b'raw', b'raw']]"),
    returns("text", "['größe']"),
    returns("subclass_of_str", "[S('x')]", "class S(str):\n    pass"),
    returns("numbers", "[[1, 1.5, True, None, 10**20, 1e-7, 1e16]]"),
    returns("nested", "[{'a': [1, {'b': 'ü'}], 'c': {}}]"),
    returns("int_keys", "[{1: 'a', 2.5: 'b', None: 'c', True: 'd'}]"),
    returns("tuple_keys", "[{('a', 1): 2}]"),
    returns("a_set", "[{1}]"),
    returns("a_decimal", "[decimal.Decimal('1.5')]", "import decimal"),
    returns("a_date", "[datetime.date(2020, 1, 1)]", "import datetime"),
    returns("an_exception", "[ValueError('x')]"),
    returns("not_a_number_text", "['NaN']"),
    returns(
        "an_array",
        "[numpy.arange(3)]",
        "import numpy",
        difference="TorchServe ends with a TypeError; an array is the list of its numbers here.",
    ),
    returns(
        "numpy_numbers",
        "[{'a': numpy.float32(0.5), 'b': numpy.bool_(True)}]",
        "import numpy",
        difference="TorchServe ends with a TypeError; NumPy's numbers are JSON numbers here.",
    ),
    returns("a_tensor", "[torch.tensor([1.0])]", "import torch"),
    returns("an_empty_list", "[[]]"),
    returns("an_empty_text", "['']"),
    returns("empty_bytes", "[b'']"),
    Case(
        "status_and_headers",
        """
def handle(data, ctx):
    if data is None:
        return None
    ctx.set_response_status(code=201, phrase="Made", idx=0)
    ctx.set_response_header(0, "X-Own", "yes")
    ctx.set_response_content_type(0, "text/csv")
    return ["a,b"]
""",
        headers=("content-type", "x-own"),
    ),
    Case(
        "rejected",
        """
from ts.utils.util import PredictionException

def handle(data, ctx):
    if data is None:
        return None
    raise PredictionException("not today", 418)
""",
    ),
    Case("raised", "def handle(data, ctx):\n    if data is not None:\n        raise ValueError('no')\n"),
    Case(
        "metrics",
        """
def handle(data, ctx):
    if data is None:
        return None
    ctx.metrics.add_counter("Seen", len(data), 0)
    ctx.metrics.add_time("Took", 1.5, None, "ms")
    ctx.metrics.add_size("Size", 2, None, "MB")
    ctx.metrics.add_percent("Share", 50.0)
    return ["measured"] * len(data)
""",
    ),
    Case(
        "streamed",
        """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, ctx):
    if data is None:
        return None
    for word in ("one ", "two "):
        send_intermediate_predict_response([word], ctx.request_ids, "ok", 200, ctx)
    return ["three"]
""",
    ),
)
