"""Hosts of requests: a server without an API key on the loopback address refuses foreign names.

A web page can point its host name to 127.0.0.1 (DNS rebinding); a browser on this machine would
then send the page's requests here, and give it the answers. The Host header has the page's name.
"""

from ipaddress import ip_address
from socket import SOCK_STREAM, getaddrinfo


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on `host`, a name or an address, is for this machine."""
    try:
        return _is_loopback_address(str(getaddrinfo(host, None, type=SOCK_STREAM)[0][4][0]))
    except OSError:  # which binding reports
        return False


def names_this_machine(header: str) -> bool:
    """Return whether a Host header, with or without a port, is localhost or a loopback address.

    >>> names_this_machine("localhost:5000"), names_this_machine("127.0.0.1.evil.org")
    (True, False)
    """
    if header.startswith("["):
        return _is_loopback_address(header[1:].partition("]")[0])
    name = header.partition(":")[0].lower().removesuffix(".")
    return name == "localhost" or name.endswith(".localhost") or _is_loopback_address(name)


def _is_loopback_address(text: str) -> bool:
    try:
        return ip_address(text).is_loopback
    except ValueError:
        return False
