"""Code that sends the same request as a form: for curl, Python and JavaScript."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from serve_app.console.forms import InputKind, RequestContent

_MAX_LITERAL = 2000  # characters of a body that the code repeats


@dataclass(frozen=True)
class CodeSamples:
    """Code for one request; a key is read from the variable TORCHRELAY_TOKEN.

    ``content`` is None before the form was sent. A file is referred to by its name.
    """

    address: str
    model: str
    version: str
    kind: InputKind
    content: RequestContent | None
    has_key: bool

    def by_language(self) -> dict[str, str]:
        return {"curl": self.curl(), "Python": self.python(), "JavaScript": self.javascript()}

    def curl(self) -> str:
        body = f"--data-binary {shlex.quote('@' + self._file)}"
        if not self._file:
            body = f"--data-raw {shlex.quote(self._text)}"
        lines = [f"curl {shlex.quote(self._url)}"]
        if self.has_key:
            lines.append('-H "Authorization: Bearer $TORCHRELAY_TOKEN"')
        lines += [f"-H {shlex.quote('Content-Type: ' + self._content_type)}", body]
        return " \\\n  ".join(lines)

    def python(self) -> str:
        imports = [
            *(["import json"] if self.kind == "tensors" else []),
            *(["import os"] if self.has_key else []),
            *(["from pathlib import Path"] if self._file else []),
            *([""] if self.has_key or self._file or self.kind == "tensors" else []),
        ]
        token = ', token=os.environ["TORCHRELAY_TOKEN"]' if self.has_key else ""
        body = f"Path({self._file!r}).read_bytes()" if self._file else repr(self._text)
        version = f", version={self.version!r}" if self.version else ""
        if self.kind == "chat":
            call = [
                'messages = [{"role": "user", "content": "Hello"}]',
                f"for text in client.stream_chat({self.model!r}, messages):",
                '    print(text, end="", flush=True)',
            ]
        elif self.kind == "tensors":
            call = [f"print(client.infer({self.model!r}, json.loads({body}){version}))"]
        else:
            call = [
                f"response = client.request({self.model!r}, {body}, {self._content_type!r}{version})",
                "print(response.status, response.content_type, response.body)",
            ]
        start = ["from torchrelay import Client", "", f"with Client({self.address!r}{token}) as client:"]
        return "\n".join([*imports, *start, *("    " + line for line in call)])

    def javascript(self) -> str:
        key = ', "Authorization": `Bearer ${key}`' if self.has_key else ""
        body = "fileInput.files[0]" if self._file else json.dumps(self._text)
        return (
            f"const response = await fetch({json.dumps(self._url)}, {{\n"
            f'  method: "POST",\n  headers: {{"Content-Type": {json.dumps(self._content_type)}{key}}},\n'
            f"  body: {body},\n}});\nconsole.log(response.status, await response.text());"
        )

    @property
    def _url(self) -> str:
        if self.kind == "chat":
            return f"{self.address}/v1/chat/completions"
        if self.kind == "tensors":
            version = f"/versions/{self.version}" if self.version else ""
            return f"{self.address}/v2/models/{self.model}{version}/infer"
        return f"{self.address}/predictions/{self.model}" + (f"/{self.version}" if self.version else "")

    @property
    def _content_type(self) -> str:
        return self.content.content_type if self.content else "application/json"

    @property
    def _file(self) -> str:
        """The name of the file that is sent; a long text is one, too."""
        if self.content is None:
            return ""
        long_text = "request.txt" if len(self.content.body) > _MAX_LITERAL else ""
        return self.content.file_name or long_text

    @property
    def _text(self) -> str:
        if self.kind == "chat":
            messages = [{"role": "user", "content": "Hello"}]
            return json.dumps({"model": self.model, "messages": messages})
        return "" if self.content is None else self.content.body.decode("utf-8", "replace")
