"""At which address and interface the stores, gloo and NCCL listen."""

import os
import socket

import pytest

from gemctl.ranks import agent, rendezvous


@pytest.mark.parametrize(
    ("names", "chosen", "expected"),
    [
        (["127.0.0.1", "10.0.0.8", "10.0.0.7"], None, "10.0.0.7"),
        (["10.0.0.8", "127.0.0.1"], None, ""),  # 10.0.0.8 is another machine's
        (["127.0.1.1"], None, ""),  # as /etc/hosts of Debian has a machine's own name
        (["127.0.1.1"], "lo", "127.0.0.1"),
        (["127.0.1.1"], "nope0", ""),
        ([], None, ""),
    ],
)
def test_node_0_listens_at_the_address_that_its_name_means(
    names: list[str], chosen: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, own = {"n1": names}, {"127.0.0.1", "127.0.1.1", "10.0.0.7"}
    monkeypatch.setattr(rendezvous, "_is_own", own.__contains__)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: [(0, 0, 0, "", (name, 0)) for name in known[host]]
    )
    if chosen is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    assert rendezvous._own_address("n1") == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1"])
def test_node_0_listens_at_an_address_that_is_given(address: str) -> None:
    assert rendezvous._own_address(address) == address


@pytest.mark.parametrize(
    ("address", "chosen", "gloo", "nccl"),
    [
        ("127.0.0.1", None, "lo", "=lo"),
        ("127.0.0.1", "eth7", "lo", "=lo"),  # nobody else has to reach a run on one host
        ("10.0.0.7", "eth7", "eth7", "eth7"),
        ("10.0.0.7", None, "eth1", "=eth1"),
    ],
)
def test_gloo_and_nccl_listen_where_the_hosts_have_met(
    address: str, chosen: str | None, gloo: str, nccl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "interface_of", {"127.0.0.1": "lo", "10.0.0.7": "eth1"}.get)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE"):
        monkeypatch.setenv(name, chosen or "")
    agent._use_interface(address)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (gloo, nccl)
