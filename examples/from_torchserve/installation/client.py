"""The installation's client: asks for everything it uses, and writes down what came back.

``python client.py INFERENCE MANAGEMENT METRICS FOLDER`` prints a list of steps as JSON. It needs nothing but Python.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

INFERENCE, MANAGEMENT, METRICS, FOLDER = sys.argv[1:5]
STEPS = []


def keys():
    return {kind: entry["key"] for kind, entry in json.loads(Path(FOLDER, "key_file.json").read_text()).items()}


def ask(step, url, body=None, method=None, kind=None, token=None, **headers):
    """Send one request, note status, headers and body."""
    if token is None and kind is not None:
        token = keys()[kind]
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, data=body, method=method or ("GET" if body is None else "POST"))
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, sent, content = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        status, sent, content = error.code, error.headers, error.read()
    STEPS.append(
        {
            "step": step,
            "status": status,
            "headers": {name.lower(): value for name, value in sent.items()},
            "body": content.decode("utf-8", "backslashreplace"),
        }
    )
    return content


def form(**fields):
    boundary = "----fields"
    body = ""
    for name, value in fields.items():
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
    return f"{body}--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def until_loaded():
    """The server takes requests before its models are there."""
    deadline = time.monotonic() + 120
    for model in ("digits", "iris", "words"):
        while True:
            request = urllib.request.Request(f"{MANAGEMENT}/models/{model}")
            try:
                request.add_header("Authorization", f"Bearer {keys()['management']}")
                with urllib.request.urlopen(request, timeout=10) as answer:
                    workers = json.load(answer)[0]["workers"]
                if workers and all(worker["status"] == "READY" for worker in workers):
                    break
            except (OSError, ValueError):
                pass
            if time.monotonic() > deadline:
                sys.exit(f"{model} was not loaded in time")
            time.sleep(0.2)


def main():
    until_loaded()
    image = Path(FOLDER, "three.png").read_bytes()
    flower = b"[5.1, 3.5, 1.4, 0.2]"
    json_type = {"Content_Type": "application/json"}
    p, m = f"{INFERENCE}/predictions", f"{MANAGEMENT}/models"

    ask("health", f"{INFERENCE}/ping", kind="inference")
    ask("health without a token", f"{INFERENCE}/ping")
    ask("an image", f"{p}/digits", image, kind="inference", Content_Type="image/png")
    ask("an image, by version", f"{p}/digits/1.0", image, kind="inference", Content_Type="image/png")
    ask("no image", f"{p}/digits", b"no image", kind="inference", Content_Type="image/png")
    ask("numbers", f"{p}/iris", flower, kind="inference", **json_type)
    ask("text", f"{p}/words", b"the quick brown fox", kind="inference", Content_Type="text/plain")
    body, content_type = form(text="two words")
    ask("a form", f"{p}/words", body, kind="inference", Content_Type=content_type)
    ask("JSON", f"{p}/words", b'{"text": "one"}', kind="inference", **json_type)
    ask("a status of the handler's", f"{p}/words", b" ", kind="inference", Content_Type="text/plain")
    ask("a handler that fails", f"{p}/words", b"fail", kind="inference", Content_Type="text/plain")
    ask("a model that there is not", f"{p}/nobody", b"x", kind="inference", Content_Type="text/plain")
    ask("a version that there is not", f"{p}/words/9.9", b"x", kind="inference", Content_Type="text/plain")
    ask("no route", f"{INFERENCE}/nothing/here", kind="inference")
    ask("no token", f"{p}/words", b"x", Content_Type="text/plain")
    ask("a wrong token", f"{p}/words", b"x", token="nonsense", Content_Type="text/plain")
    ask("a token of the other kind", f"{p}/words", b"x", kind="management", Content_Type="text/plain")

    ask("models", m, kind="management")
    ask("models without a token", m)
    ask("describe digits", f"{m}/digits", kind="management")
    ask("describe iris", f"{m}/iris", kind="management")
    ask("scale up", f"{m}/words?min_worker=2&synchronous=true", method="PUT", kind="management")
    ask("scale wrongly", f"{m}/words?min_worker=3&max_worker=1", method="PUT", kind="management")
    later = Path(FOLDER, "later", "words-2.0.mar").resolve().as_uri()
    register = f"{m}?url={later}&initial_workers=1&synchronous=true"
    ask("register a version", register, b"", kind="management")
    ask("register it again", register, b"", kind="management")
    ask("register nothing", m, b"", kind="management")
    ask("register what is not there", f"{m}?url=nobody.mar", b"", kind="management")
    ask("the new version", f"{p}/words/2.0", b"a b c", kind="inference", Content_Type="text/plain")
    ask("make it the default", f"{m}/words/2.0/set-default", method="PUT", kind="management")
    ask("describe all", f"{m}/words/all", kind="management")
    ask("remove the default", f"{m}/words/2.0", method="DELETE", kind="management")
    ask("remove the old version", f"{m}/words/1.0", method="DELETE", kind="management")
    ask("the default now", f"{p}/words", b"a b", kind="inference", Content_Type="text/plain")

    old = keys()["inference"]
    ask("another token", f"{MANAGEMENT}/token?type=inference", kind="API")
    ask("the old token", f"{p}/iris", flower, token=old, **json_type)
    ask("the new token", f"{p}/iris", flower, kind="inference", **json_type)
    ask("a token of no kind", f"{MANAGEMENT}/token?type=other", kind="API")

    ask("metrics", f"{METRICS}/metrics")
    ask("some metrics", f"{METRICS}/metrics?name[]=WordsSeen&name[]=Requests2XX")
    print(json.dumps(STEPS, indent=1))


main()
