import json
from pathlib import Path

import pytest
import torchrelay
from model import Model

SAMPLE = Path(__file__).parent / "samples/request.json"


def test_the_sample():
    with torchrelay.local(Model) as client:
        assert client.predict(json.loads(SAMPLE.read_text())) == {"words": 2}


def test_a_request_without_text_is_refused():
    with torchrelay.local(Model) as client, pytest.raises(torchrelay.ServerError, match="Field required"):
        client.predict({})
