"""Where ranks meet: never at a loopback address of several hosts, at one that all have reached, and
not for ever."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rose.comm import address
from rose.comm.address import Host, RendezvousError
from tests.processes import ran

RANKS = Path(__file__).with_name("address_ranks.py")
DEADLINE_S = 240.0
SAY_AND_DO = 'hostname "$0" && exec "$@"'
HOSTS = "127.0.0.1 localhost\n127.0.1.1 {name}\n"  # as Debian, Ubuntu and DGX OS write it


@pytest.mark.parametrize("interface", [None, "lo"])
def test_ranks_of_one_host_meet_on_loopback_and_the_port_stays_open(interface):
    """A second rank gets the place: mailbox_ranks.py."""
    place = address.meet(lambda text: [text], 0, interface)
    assert (place.address, place.interface) == ("127.0.0.1", "lo")
    with place.listener as listening:
        assert listening.getsockname() == ("127.0.0.1", place.port)
        with pytest.raises(OSError):
            address._listen("127.0.0.1").bind(("127.0.0.1", place.port))


def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(RendezvousError, match="cluster.interface='ib7'.*no such interface; it has"):
        address.check_interface("ib7")


def test_another_service_at_that_address_is_not_the_first_rank():
    """As where a bridge has one address on every host."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            visitor, _ = other.accept()
            visitor.sendall(b"220 another service, at your service")
            visitor.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert address._try(list(other.getsockname()), os.urandom(address.TOKEN_BYTES)) is None
        thread.join(30)


def test_addresses_that_routes_lead_to_come_first_and_loopback_never(monkeypatch):
    hosts = [
        Host("a", "1", [("docker0", "172.17.0.1"), ("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")]),
        Host("b", "2", [("ib0", "10.1.0.2")]),
        Host("b", "2", [("ib0", "10.1.0.2")]),
    ]
    monkeypatch.setattr(address, "_source", lambda there: "10.1.0.1")
    found = address._by_vote(hosts)
    assert found == ["10.1.0.1", "10.0.0.1", "172.17.0.1"], "a bridge of all hosts comes last"
    assert not [ip for _, ip in address.addresses_of(None) if ip.startswith("127.")]


def test_of_networks_that_all_hosts_share_infiniband_comes_first(monkeypatch, tmp_path):
    """NCCL is told the one that is taken, and would by itself have taken InfiniBand's."""
    linux = {"eno1": ("1", "1000"), "eno2": ("1", "100000"), "ibp3s0": ("32", "40000")}
    linux |= {"tun0": ("65534", "")}
    for name, (kind, speed) in linux.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(f"{kind}\n")
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    monkeypatch.setattr(address, "INTERFACES", tmp_path)
    monkeypatch.setattr(address, "_source", lambda there: there[:-1] + "1")
    own = {name: f"10.{number}.0.1" for number, name in enumerate(linux)}
    other = {name: ip[:-1] + "2" for name, ip in own.items()}
    hosts = [Host("a", "1", list(own.items())), Host("b", "2", list(other.items()))]
    assert address._by_vote(hosts) == [own[name] for name in ("ibp3s0", "eno2", "eno1", "tun0")]


class TwoHosts:
    """Network namespaces rose-PID-a and -b with a Debian hosts file: 10.77.0.1 and 10.77.0.2 on one
    wire, and a bridge that both have alike."""

    def __init__(self) -> None:
        self.names = [f"rose-{os.getpid()}-{letter}" for letter in "ab"]
        self.files = [Path("/etc/netns") / name for name in self.names]

    def make(self) -> None:
        for name, files in zip(self.names, self.files, strict=True):
            files.mkdir(parents=True)
            (files / "hosts").write_text(HOSTS.format(name=name))
            self.ip(f"netns add {name}")
            self.inside(name, "link set lo up")
            self.inside(name, "link add docker0 type veth peer name port")
            self.inside(name, "address add 172.17.0.1/16 dev docker0")
            self.inside(name, "link set docker0 up")
            self.inside(name, "link set port up")
        a, b = self.names
        self.ip(f"link add wire netns {a} type veth peer name wire netns {b}")
        for number, name in enumerate(self.names, 1):
            self.inside(name, f"address add 10.77.0.{number}/24 dev wire")
            self.inside(name, "link set wire up")

    def remove(self) -> None:
        for name, files in zip(self.names, self.files, strict=True):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            for file in files.glob("*"):
                file.unlink()
            if files.exists():
                files.rmdir()

    def ip(self, words: str) -> None:
        ran(["ip", *words.split()], check=True)

    def inside(self, name: str, words: str) -> None:
        self.ip(f"netns exec {name} ip {words}")

    def ranks(self, folder: Path, *arguments: str) -> list[tuple[int, dict, str]]:
        """One rank in each, with the host's own name set; (exit code, its words, its errors) of
        each."""
        env = {key: word for key, word in os.environ.items() if not key.endswith("SOCKET_IFNAME")}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [
            subprocess.Popen(
                [*f"ip netns exec {name} unshare --uts sh -c".split(), SAY_AND_DO, name]
                + [sys.executable, str(RANKS), str(folder), str(rank), *arguments],
                env=env,
                **pipes,
            )
            for rank, name in enumerate(self.names)
        ]
        try:
            ended = [process.communicate(timeout=DEADLINE_S) for process in started]
        finally:
            for process in started:
                process.kill()
        said = zip(started, ended, strict=True)
        return [(each.returncode, json.loads(out or "{}"), errors) for each, (out, errors) in said]


@pytest.fixture(scope="module")
def two_hosts():
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    hosts = TwoHosts()
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


@pytest.mark.slow
def test_two_hosts_whose_names_lead_to_loopback_meet_on_the_wire_between_them(two_hosts, tmp_path):
    ended = two_hosts.ranks(tmp_path)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert [words["address"] for _, words, _ in ended] == ["10.77.0.1"] * 2
    assert [words["interface"] for _, words, _ in ended] == ["wire"] * 2
    assert [(words["sum"], words["agreed"]) for _, words, _ in ended] == [(3.0, 2)] * 2
    assert all(words["name_leads_to"] == "127.0.1.1" for _, words, _ in ended)


@pytest.mark.slow
def test_hosts_that_only_seem_to_share_a_network_are_named_within_a_minute(two_hosts, tmp_path):
    for code, _, errors in two_hosts.ranks(tmp_path, "docker0"):
        assert code == 1 and "RendezvousError" in errors
        assert all(name in errors for name in two_hosts.names) and "172.17.0.1 (docker0)" in errors


@pytest.mark.slow
def test_a_rank_that_never_connects_ends_the_others_with_place_and_hosts(two_hosts, tmp_path):
    (code, _, errors), _ = two_hosts.ranks(tmp_path, "wire", "1")
    assert code == 1 and "RendezvousError" in errors and "10.77.0.1:" in errors
    assert all(name in errors for name in two_hosts.names)


def test_nccl_takes_one_interface_and_not_all_that_begin_like_it(monkeypatch, make_config):
    for name in address.INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    address.Place("10.0.0.1", 1, None, "bond0", []).use_interface()
    asked = make_config("cluster.interface=bond0").cluster.interface_env
    # The "=" makes NCCL match the whole name, so that it does not take bond0.100.
    for found in (os.environ, asked):
        assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("=bond0", "bond0")


def test_a_group_of_ranks_on_two_hosts_is_found():
    def place(*spaces):
        return address.Place("", 1, None, None, [address.Host(s, s, []) for s in spaces])

    assert not place("a", "a", "b", "b").spans_hosts(2)
    assert not address.local_place(1).spans_hosts(2)
    assert place("a", "b", "a", "b").spans_hosts(2)
    assert place("a", "a", "a", "b", "b", "b").spans_hosts(2)
