"""Apache ECharts as one script for an HTML page, from the files that NiceGUI ships.

NiceGUI bundles ECharts as an ES module of two files: ``index.js`` exports the namespace under the name
``echarts`` from a chunk beside it. A page that is opened from a disk cannot import files, so the chunk
becomes a classic script that sets ``globalThis.echarts``.
"""

from __future__ import annotations

import re
from importlib import resources

from handlers import extras

_INDEX = re.compile(r'import\{(?P<names>[^}]*)\}from"\./(?P<chunk>[\w.-]+\.js)";export\{(?P<exports>[^}]*)\}')
_EXPORTS = re.compile(r"export\{(?P<names>[^{}]*)\};?\s*(//# sourceMappingURL=\S*\s*)?$")
_LAZY_IMPORT = re.compile(r'import\("\./[\w.-]+\.js"\)')  # of echarts-gl, which no plot here uses


class EChartsMissing(Exception):
    """An error: NiceGUI is not installed, or its ECharts file has an unknown form."""


def load_script() -> str:
    """Return the script, safe inside of a ``<script>`` element. Raises EChartsMissing."""
    try:
        folder = resources.files("nicegui") / "elements" / "echart" / "dist"
    except ModuleNotFoundError as error:
        command = extras.install_command("nicegui")
        message = f"An HTML report needs Apache ECharts, which the package nicegui contains: {command}"
        raise EChartsMissing(message) from error
    try:
        index = _INDEX.search((folder / "index.js").read_text("utf-8"))
        chunk = (folder / index["chunk"]).read_text("utf-8") if index else ""
    except OSError:
        index, chunk = None, ""
    end = _EXPORTS.search(chunk)
    if index is None or end is None:
        raise EChartsMissing(
            f"{folder}: the ECharts files of the installed nicegui have an unknown form, so no HTML report "
            "can be written; install the version of constraints.txt."
        )
    imported = _find_name(index["exports"], exported="echarts")
    name = _find_name(end["names"], exported=_find_name(index["names"], exported=imported))
    body = _LAZY_IMPORT.sub("Promise.reject()", chunk[: end.start()])
    script = f'(function(){{"use strict";{body}\nglobalThis.echarts={name};}})();'
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _find_name(clause: str, exported: str) -> str:
    """Return the name before ``as`` in the clause of an import or export, by the name after it."""
    for part in clause.split(","):
        name, _, alias = part.strip().partition(" as ")
        if (alias or name) == exported:
            return name
    raise EChartsMissing(f"The ECharts files of the installed nicegui export no {exported!r}.")
