"""The virtual environments of the servers that are compared, each created when it is needed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

CACHE = Path("~/.cache/torchrelay-bench").expanduser()

# Name -> what pip installs, one call a line.
PACKAGES: Mapping[str, Sequence[Sequence[str]]] = {
    # Its image handlers import captum, which requires an older numpy than torch does.
    "torchserve": (
        ("torchserve==0.12.0", "matplotlib==3.11.2", "tqdm==4.70.1"),
        ("--no-deps", "captum==0.9.0"),
    ),
    "litserve": (("litserve==0.2.19",),),
    # Its worker processes call get_event_loop() without a loop, which later releases of uvloop refuse.
    "mlserver": (("mlserver==1.7.1", "uvloop==0.21.0"),),
    "bentoml": (("bentoml==1.4.40",),),
}

# TorchServe's image handlers import torchvision, whose wheel does not go with every build of torch. Its
# transforms of an image are Pillow's, as ours are, so ours stand in for them and both servers do the same
# work.
_TRANSFORMS = """from handlers.builtin.vision import CenterCrop, Compose, Normalize, Resize, ToTensor

__all__ = ["CenterCrop", "Compose", "Normalize", "Resize", "ToTensor"]
"""


class PeerFailed(Exception):
    """A server to compare with cannot be installed or did not start; the message has the reason."""


def version(name: str) -> str:
    """Return the pinned version of a server."""
    return PACKAGES[name][0][0].partition("==")[2]


def interpreter(name: str, cache: Path = CACHE) -> Path:
    """Return the interpreter of a server's environment; create the environment when it is missing.

    The server's own packages come first, then this interpreter's: the same torch, and nothing is downloaded
    twice. Raises PeerFailed with pip's message.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    environment = cache / f"{name}-{version(name)}-py{here}"
    python, done = environment / "bin" / "python", environment / "installed"
    packages = Path(sysconfig.get_path("purelib"))
    made_of = f"{packages}\n{PACKAGES[name]}\n{_TRANSFORMS}"
    if done.is_file() and done.read_text() == made_of:
        return python
    shutil.rmtree(environment, ignore_errors=True)
    try:
        _run(sys.executable, "-m", "venv", str(environment))
        (site,) = environment.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text(f"{packages}\n")
        for requirements in PACKAGES[name]:
            _run(str(python), "-m", "pip", "install", "-q", *requirements)
    except subprocess.CalledProcessError as error:
        raise PeerFailed(
            f"pip could not install {name} {version(name)}:\n{error.stderr.strip()[-1000:]}"
        ) from error
    if name == "torchserve":
        (site / "torchvision").mkdir(exist_ok=True)
        (site / "torchvision" / "__init__.py").touch()
        (site / "torchvision" / "transforms.py").write_text(_TRANSFORMS)
    done.write_text(made_of)
    return python


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
