"""The installation's client, which records the responses to all its requests.

``python client.py INFERENCE MANAGEMENT METRICS FOLDER`` prints the steps as JSON. It needs only Python.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

INFERENCE, MANAGEMENT, METRICS, FOLDER = sys.argv[1:5]
PORTS = {"inference": INFERENCE, "management": MANAGEMENT, "metrics": METRICS}
STEPS = []


def read_keys():
    return {
        kind: entry["key"] for kind, entry in json.loads(Path(FOLDER, "key_file.json").read_text()).items()
    }


def send(step, url, body=None, method=None, kind=None, token=None, **headers):
    """Send a request and record the status, headers and body of the response."""
    if token is None and kind is not None:
        token = read_keys()[kind]
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, data=body, method=method or ("GET" if body is None else "POST"))
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, response_headers, content = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        status, response_headers, content = error.code, error.headers, error.read()
    STEPS.append(
        {
            "step": step,
            "port": next(n for n, u in PORTS.items() if url.startswith(u)),
            "status": status,
            "headers": {name.lower(): value for name, value in response_headers.items()},
            "body": content.decode("utf-8", "backslashreplace"),
        }
    )
    return content


def encode_form(**fields):
    boundary = "----fields"
    body = ""
    for name, value in fields.items():
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
    return f"{body}--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def wait_until_loaded():
    """Wait for the models: the server accepts requests before they are loaded."""
    deadline = time.monotonic() + 120
    for model in ("digits", "iris", "words"):
        while True:
            request = urllib.request.Request(f"{MANAGEMENT}/models/{model}")
            try:
                request.add_header("Authorization", f"Bearer {read_keys()['management']}")
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
    wait_until_loaded()
    image = Path(FOLDER, "three.png").read_bytes()
    flower = b"[5.1, 3.5, 1.4, 0.2]"
    json_type = {"Content_Type": "application/json"}
    p, m = f"{INFERENCE}/predictions", f"{MANAGEMENT}/models"

    send("health", f"{INFERENCE}/ping", kind="inference")
    send("health without a token", f"{INFERENCE}/ping")
    send("an image", f"{p}/digits", image, kind="inference", Content_Type="image/png")
    send("an image, by version", f"{p}/digits/1.0", image, kind="inference", Content_Type="image/png")
    send("no image", f"{p}/digits", b"no image", kind="inference", Content_Type="image/png")
    send("numbers", f"{p}/iris", flower, kind="inference", **json_type)
    send("text", f"{p}/words", b"the quick brown fox", kind="inference", Content_Type="text/plain")
    body, content_type = encode_form(text="two words")
    send("a form", f"{p}/words", body, kind="inference", Content_Type=content_type)
    send("JSON", f"{p}/words", b'{"text": "one"}', kind="inference", **json_type)
    send("a status of the handler's", f"{p}/words", b" ", kind="inference", Content_Type="text/plain")
    send("a handler that fails", f"{p}/words", b"fail", kind="inference", Content_Type="text/plain")
    send("a model that there is not", f"{p}/nobody", b"x", kind="inference", Content_Type="text/plain")
    send("a version that there is not", f"{p}/words/9.9", b"x", kind="inference", Content_Type="text/plain")
    send("no route", f"{INFERENCE}/nothing/here", kind="inference")
    send("no token", f"{p}/words", b"x", Content_Type="text/plain")
    send("a wrong token", f"{p}/words", b"x", token="nonsense", Content_Type="text/plain")
    send("a token of the other kind", f"{p}/words", b"x", kind="management", Content_Type="text/plain")

    send("models", m, kind="management")
    send("models without a token", m)
    send("describe digits", f"{m}/digits", kind="management")
    send("describe iris", f"{m}/iris", kind="management")
    send("scale up", f"{m}/words?min_worker=2&synchronous=true", method="PUT", kind="management")
    send("scale wrongly", f"{m}/words?min_worker=3&max_worker=1", method="PUT", kind="management")
    later = Path(FOLDER, "later", "words-2.0.mar").resolve().as_uri()
    register = f"{m}?url={later}&initial_workers=1&synchronous=true"
    send("register a version", register, b"", kind="management")
    send("register it again", register, b"", kind="management")
    send("register nothing", m, b"", kind="management")
    send("register what is not there", f"{m}?url=nobody.mar", b"", kind="management")
    send("the new version", f"{p}/words/2.0", b"a b c", kind="inference", Content_Type="text/plain")
    send("make it the default", f"{m}/words/2.0/set-default", method="PUT", kind="management")
    send("describe all", f"{m}/words/all", kind="management")
    send("remove the default", f"{m}/words/2.0", method="DELETE", kind="management")
    send("remove the old version", f"{m}/words/1.0", method="DELETE", kind="management")
    send("the default now", f"{p}/words", b"a b", kind="inference", Content_Type="text/plain")

    old = read_keys()["inference"]
    send("another token", f"{MANAGEMENT}/token?type=inference", kind="API")
    send("the old token", f"{p}/iris", flower, token=old, **json_type)
    send("the new token", f"{p}/iris", flower, kind="inference", **json_type)
    send("a token of no kind", f"{MANAGEMENT}/token?type=other", kind="API")

    send("metrics", f"{METRICS}/metrics")
    send("some metrics", f"{METRICS}/metrics?name[]=WordsSeen&name[]=Requests2XX")
    print(json.dumps(STEPS, indent=1))


main()
