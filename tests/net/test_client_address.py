import pytest

from serve_app.errors import ConfigurationError
from serve_app.net.request_origin import TrustedProxies, inference_proxies

HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "serve_app.deployments.ray_internals.haproxy:install",
}


@pytest.mark.parametrize(
    ("networks", "peer", "forwarded", "client"),
    [
        ([], "127.0.0.1", ["192.0.2.7"], "127.0.0.1"),
        (["10.0.0.0/8"], "192.0.2.1", ["192.0.2.7"], "192.0.2.1"),
        (["10.0.0.0/8"], "10.1.1.1", ["192.0.2.7"], "192.0.2.7"),
        (["10.0.0.0/8"], "10.1.1.1", ["192.0.2.66, 192.0.2.7, 10.2.2.2"], "192.0.2.7"),
        (["10.0.0.0/8"], "10.1.1.1", ["192.0.2.66", "192.0.2.7"], "192.0.2.7"),
        (["10.0.0.0/8"], "10.1.1.1", ['"GET / HTTP/1.1" 200'], "10.1.1.1"),
        (["fe80::/10"], "fe80::1", ['fe80::2%a" 200'], "fe80::1"),
        (["10.0.0.0/8"], "10.1.1.1", [""], "10.1.1.1"),
        (["10.0.0.0/8"], "", ["192.0.2.7"], ""),
    ],
)
def test_only_entries_of_trusted_proxies_count(networks, peer, forwarded, client):
    assert TrustedProxies(networks).resolve(peer, forwarded) == client


def test_loopback_is_trusted_behind_our_haproxy_alone():
    for environ, client in ((HAPROXY, "192.0.2.7"), ({}, "127.0.0.1")):
        assert inference_proxies((), environ).resolve("127.0.0.1", ["192.0.2.7"]) == client


def test_client_on_loopback_cannot_name_another_address_through_haproxy():
    proxies = inference_proxies(["10.0.0.0/8"], HAPROXY)
    assert proxies.resolve("127.0.0.1", ["192.0.2.66", "127.0.0.1"]) == "127.0.0.1"
    assert proxies.resolve("127.0.0.1", ["192.0.2.66", "192.0.2.7"]) == "192.0.2.7"
    assert proxies.resolve("127.0.0.1", ["192.0.2.66, 192.0.2.7", "10.1.1.1"]) == "192.0.2.7"


def test_invalid_networks_are_refused():
    with pytest.raises(ConfigurationError, match=r"telemetry\.trusted_proxies.*10\.0\.0\.0/8"):
        TrustedProxies(["proxy.example"])


def test_haproxy_sends_the_clients_address():
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    from serve_app.deployments.ray_internals import haproxy

    template = haproxy.adapt_template(HAPROXY_CONFIG_TEMPLATE)
    assert "http-request set-header x-forwarded-for %[src]" in template or "option forwardfor" in template
